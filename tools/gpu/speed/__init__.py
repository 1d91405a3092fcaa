"""The sections that measure: the hardware's ceilings, kernels, steps of whole models, and the engine's loop.

Imports `cases`, `devices` and `results`. Start reading in `kernel_cases.py`, which lists the kernels' cases by name,
and in `end_to_end.py`.
"""
