"""A model's operations on NVIDIA GPUs: torch multiplies matrices, our own CUDA C++ kernels do everything else.

From the top: `kernel_manifest` lists every kernel, `ops` are the operations, then come `attention`, `step` (data that
each step sends to and from the GPU), `memory` and `device` (the GPU, and how kernels are compiled
and launched). A package may import those after it. The CUDA sources are in `kernels/`: `common` is what all include,
`step` and `rows` (norms, activations, RoPE) come before `products` (of experts too), then `prefill`, `decode` and
`sampling`. Nothing here imports `passes.cpu`.
"""
