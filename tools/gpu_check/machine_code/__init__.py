"""Properties of compiled kernels, read without a GPU: registers, shared memory, blocks per multiprocessor, instructions
per tile.

`kernel_table.py` is also a command: `python3 -m penstock.tools.gpu_check.machine_code.kernel_table`. Imports the
backend's kernels and nothing that needs a GPU. Start reading there.
"""
