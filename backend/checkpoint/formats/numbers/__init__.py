"""Formats of numbers and of blocks of numbers: small floats, small integers, and the types of GGML."""
