"""The decoder on the CPU.

Start with forward_pass.py, which chooses between two implementations of the operations. native_ops.py calls our own C++
kernels (kernels/), which native_library.py compiles at the first start; native_weights.py packs weights for them, into
memory of weight_memory/. torch_ops.py is the reference and the fallback; deterministic_torch_ops.py gives a row the
same bits in any batch. Only these two use the torch_*.py files.
"""
