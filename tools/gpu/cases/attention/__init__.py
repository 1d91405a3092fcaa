"""Cases of attention: decode, prefill and encoders, and every setting of their kernels."""
