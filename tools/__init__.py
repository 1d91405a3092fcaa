"""The laboratory: what measures, attacks and rehearses the server, and what made the demo models.

`bench` measures a server or a part of it, `chaos` attacks one, `replay` runs a recording again, `gpu` checks and
measures the CUDA decoder, `random_model` writes checkpoints of random weights, `demo_model` trained the shipped models,
and `forward_pass_contract` is the suite for authors of forward passes, which alone is in the wheel too. For several of
these, `engine_rig` runs the engine without processes, and `processes` starts, pauses and measures them.

May import every part of the product; no part of the product imports it.
"""
