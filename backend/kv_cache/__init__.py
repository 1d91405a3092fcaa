"""The KV cache seen from the engine: how many pages there are, who holds them, and which can be reused.

The memory itself belongs to the forward pass; this package handles page numbers only. `page_pool` comes first: pages
are allocated, held, released and indexed there. `prefix_cache` finds the pages that a new sequence can reuse, by the
hashes of `page_hash`. `eviction` gives up idle pages, and `host_offload` keeps the content of some of them on the
host, in a `page_store` if it outlives the process (`--persist-kv`). `hand_over` leaves pages to the backend of an
upgrade. `budget` plans how many pages fit into memory at start. May import `sequences` for types, `forward_pass`,
`errors` and `penstock.shm`; not the scheduler or the engine.
"""
