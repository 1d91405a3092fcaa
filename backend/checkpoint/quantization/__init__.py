"""Makes int8 or int4 weights of a checkpoint when it is loaded, and keeps them for the next start.

Start with `quantized_checkpoint.py`, which the forward pass reads layer by layer like a checkpoint. `modes.py` lists
the values of --quantize, `quantizer.py` has the arithmetic, `cached_file.py` the file in the cache directory. The form
of a quantised weight is in `checkpoint/weight_forms/`.
"""
