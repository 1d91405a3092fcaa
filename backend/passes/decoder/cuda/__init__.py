"""The decoder on NVIDIA GPUs: torch multiplies matrices, our own CUDA C++ kernels do everything else.

Start with `forward_pass`: it runs steps and samples; `pooled_pass` returns vectors instead of tokens. `loading` reads
checkpoints, `cuda_graphs` captures the decode steps, `workspace_plan` decides which models fit and how much memory they
take, and `kernel_manifest` lists every kernel.

Below them, from the top: `ops` (the model's operations), `attention`, `step` (data that each step sends to and from the
GPU), `kv_cache`, and `device` (the GPU, and how kernels are compiled and launched). A package may import those after
it. The CUDA sources are in `kernels/`. Nothing here imports `decoder.cpu`.
"""
