"""Predicts a run's figures before they are measured: from bytes, operations, instructions per tile and launch gaps.

`python3 -m penstock.tools.gpu_check.prediction.predictions` prints all of them. Imports nothing that needs a GPU or
torch. Start reading in `predictions`; `machine` has the constants, `kernels` and `models` the arithmetic.
"""
