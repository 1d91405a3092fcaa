"""Any decoder of the transformers package, with its own code, over a paged KV cache.

The model computes everything but attention. `attention` replaces its attention function, writes keys and values to the
pages and attends through the page table. `model` loads a checkpoint and refuses models that cannot be served this way;
`forward_pass` is the pass.
"""
