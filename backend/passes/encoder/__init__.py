"""Encoders: vectors, scores and labels of whole sequences. Imports the decoder's kernels, threads and linears.

Start with `forward_pass` (what the engine calls) and `model` (the order of operations).
"""
