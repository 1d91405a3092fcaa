"""The process that owns the device: it takes in requests, computes their tokens in batches, and sends them back.

`main` is the `backend` command. `engine` is its loop, over `scheduling`, `sequences`, `kv_cache`, `structured_output`
and `buffers`. `forward_pass` is the interface of a model; `passes` has our own, `checkpoint` reads their weights, and
`sampling` chooses tokens on the host. The backend imports `penstock.shm` and never `penstock.frontend`. Start with
`engine`, or with `forward_pass` to add a model.
"""
