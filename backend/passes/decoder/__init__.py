"""Decoders behind `IBatchedForwardPass`.

Start with forward_pass.py, which chooses the device, then model.py, the order of operations, and ops.py, the operations
that a device implements. cpu/ and cuda/ implement them, each with its own kernels; neither imports the other.
pooled_pass.py and cuda/pooled_pass.py return vectors instead of tokens.

This package may import `checkpoint`, `sampling`, `errors` and `forward_pass`, and nothing of the engine.
"""
