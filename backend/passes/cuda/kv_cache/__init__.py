"""The KV cache on the GPU, and pages that leave it for host memory.

`cache_layout` defines where each key and value lies; the kernels use the same layout. `host_pool` has the page-locked
host memory, and `page_moves` orders saves, restores and copies around steps. Which page
belongs to which sequence is decided in `penstock.backend.kv_cache`. This package may import `device`.
"""
