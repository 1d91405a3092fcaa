"""Sampling on the host: from logits in numpy arrays to token ids, for any number of rows at once.

A forward pass on the CPU derives from `sampler.HostSampling`, which samples with the CPU kernels
(`passes/cpu/native_sampling.py`) or, where there are none, with `numpy_sampler`. May import `forward_pass` only.
"""
