"""Encoders on a GPU: the operations of `encoder.ops`, over the device and the products of the decoder's CUDA pass.

Start with `loading`, which plans memory and makes a model, then `ops`.
"""
