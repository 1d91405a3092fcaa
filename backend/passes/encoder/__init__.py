"""Encoders: vectors, scores and labels of whole sequences. Imports the decoder's kernels, threads and linears.

Start with `forward_pass` (what the engine calls) and `model` (the order of operations). `cuda_loading` plans a GPU's
memory and makes a model of `cuda_ops`, over the device and the products of the decoder's CUDA pass.
"""
