"""Reads weights that a checkpoint stores quantised: one module for each family of formats.

`declared.py` reads config.json's quantization_config into the formats of the model's linears, each a `MatrixFormat`
(`matrix_format.py`). `stored_weight.py` finds a linear's tensors in the files, checks them, and reads them as an int8
or int4 weight, or dequantised. `integers.py` unpacks integers for several formats.
"""
