"""Cases of products: quantised and rounded weights, decode steps' fused products, and experts."""
