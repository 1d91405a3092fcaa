"""The paged KV cache in plain torch, for the decoder's torch operations and for the models of transformers.

`kv_pages` stores a layer's keys or values; `query_tiles` groups a step's queries; `paged_cache` attends with both.
`page_bytes` copies a page of all layers, of this cache or of the kernels', to bytes and back.
"""
