"""A sequence: the tokens that are being computed, and their receivers.

`Sequence` holds the tokens and how many are computed. It has three parts: the pages that hold its KV, its subscribers
(`subscribers`), and how long it may wait for another sequence's prefix (`Parking`). The scheduler, the
prefix cache and the engine write to it, all on the main thread. `resumable_stream` is what outlives a reader.

It imports `forward_pass`, and for types `structured_output` and `penstock.shm`. Start with `sequence`.
"""
