"""A model's operations on the CPU, in two implementations.

`native_ops` calls our own C++ kernels (kernels/), which `library` compiles at the first start; `weight_memory` packs
weights for them. `path_choice` takes the fastest kernels of this machine. `in_torch` is the reference and the fallback.
"""
