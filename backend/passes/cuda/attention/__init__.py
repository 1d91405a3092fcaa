"""Attention over the paged KV cache.

Start with `step_attention`, which chooses the kernel for each row of a step. `decode_attention` is for rows of one
token, `prefill_attention` for rows of any length, and `kernel_limits` checks which shapes they support. This package
may import `step`, `kv_cache` and `device`.
"""
