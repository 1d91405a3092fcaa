"""`penstock gpu-check`: what a GPU must show before its figures are believed, in one run of a plain checkout.

Runs as `python3 -m penstock.tools.gpu_check` on Python 3.11 to 3.13 with torch, CuPy, numpy and safetensors alone.
"""
