"""The sections that measure whole models: steps of set lengths, the engine's loop, and other engines beside it.

`nano_vllm.py` and `transformers_batching.py` run the other engines on the same weights. A peer that fails is skipped
and fails nothing. Imports `devices` and `reporting`. Start with `end_to_end`.
"""
