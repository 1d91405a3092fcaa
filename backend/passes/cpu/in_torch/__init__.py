"""The operations in torch: the reference for the native ones, and what runs where these do not.

`paged_cache` stores keys and values, for the models of transformers too, attends with both, and copies a page of all
layers, of this cache or of the kernels', to bytes and back; `query_tiles` groups a step's queries for it.
"""
