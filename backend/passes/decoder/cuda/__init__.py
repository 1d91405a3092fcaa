"""The decoder on NVIDIA GPUs: torch for the matrix products, our own CUDA C++ kernels for all else."""
