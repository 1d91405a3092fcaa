"""Copies between host and GPU that belong to each step, and sampling.

Start with `step_rows`, the rows as kernels read them. `step_buffers` sends a step to fixed addresses on the device,
`step_sampling` samples its tokens there with `device_sampler`, and `step_results` copies tokens and log probabilities
back. This package may import `device` and `kv_cache`.
"""
