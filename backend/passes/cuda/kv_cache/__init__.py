"""The KV cache on the GPU, and pages that leave it for host memory.

`cache_layout` defines where each key and value lies; the kernels use the same layout. `page_moves` orders saves,
restores and copies around steps, and has the page-locked host memory. Which page belongs to which sequence is decided
in `penstock.backend.kv_cache`. This package may import `device`.
"""
