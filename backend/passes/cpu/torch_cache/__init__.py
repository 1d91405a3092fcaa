"""The paged KV cache in plain torch, for the decoder's torch operations and for the models of transformers.

`query_tiles` groups a step's queries; `paged_cache` stores keys and values, attends with both, and copies a page of all
layers, of this cache or of the kernels', to bytes and back.
"""
