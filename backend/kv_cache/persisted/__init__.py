"""Pages that outlive their backend, in shared memory of `penstock serve` (`--persist-kv`).

`page_store` is that memory: places for pages, and a row for each that identifies its content; `page_rows` writes and
reads the rows. `penstock.backend.kv_cache.host_offload` decides which pages are saved there; `opening` opens it at a
start. Start with `page_store`.
"""
