"""Memory of the GPU: the KV cache, and packed weights, in memory of this process or in blocks that outlive it.

`cache_layout` defines where each key and value lies; the kernels use the same layout. `page_moves` orders saves,
restores and copies of pages around steps, and has the page-locked host memory. Which page belongs to which sequence is
decided in `penstock.backend.kv_cache`.

`private_weights` is torch's own memory, and has the interface. `shared_weights` is blocks that one process fills and
later ones map, with a `weight_manifest` beside them.
"""
