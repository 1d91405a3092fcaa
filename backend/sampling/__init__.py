"""Sampling on the host: from logits in numpy arrays to token ids, for any number of rows at once.

A forward pass on the CPU derives from `sampler.HostSampling`. `penalties`, `masking` and `filters` change the
distribution, `philox` makes the random numbers, and `logprobs` reports log probabilities. May import `forward_pass`
only. Start with `sampler`; `HostSampling.sample` shows the order of everything.
"""
