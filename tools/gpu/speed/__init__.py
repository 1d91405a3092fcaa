"""What is timed: the hardware's ceilings, cases of kernels, steps of whole models, and the engine's loop.

Imports `cases`, `devices`, `items` and `results`. Start reading in `kernels.py` and `models.py`.
"""
