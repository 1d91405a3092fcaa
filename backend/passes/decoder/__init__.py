"""Decoders behind `IBatchedForwardPass`.

Start with `forward_pass`, which chooses the device, then `model`, the order of operations. `cpu_pass` and `cuda_pass`
run it on a device; `pooled_pass` returns vectors instead of tokens.

This package may import `checkpoint`, `sampling`, `errors` and `forward_pass`, and nothing of the engine.
"""
