"""`penstock gpu-check`: checks and measures the CUDA decoder on this machine's GPU, and writes a report.

It runs as `python3 -m penstock.tools.gpu` in a plain checkout: Python 3.11 to 3.13 with torch, CuPy, numpy and
safetensors, and nothing else that the server needs. Each section runs in a process of its own. Start reading in
`runner.py`, which lists the sections and the module of each.
"""
