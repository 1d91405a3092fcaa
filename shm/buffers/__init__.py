"""Buffers that a client shares with the backend, for logits, hidden states and prompts; in host or GPU memory.

`buffer_export.py` is the backend's side: allocation, loans, freeing. `shared_buffers.py` is the client's side.
`host_memory.py` and `cuda_ipc.py` are the two kinds of memory; `device_api.py` is what they need from a GPU, and
`cuda_driver.py` implements it. `cuda_blocks.py` is device memory that outlives its process. The package may import
`memory` and `messages`, and neither torch nor cupy. Start with `shared_buffers`.
"""
