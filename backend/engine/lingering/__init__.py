"""Streams that run on for a while without a reader, and that a later request of the same tenant continues.

`streams` is the table of them; what is kept of each is in `penstock.backend.sequences.kept`. May import the rest of
the engine but `intake`, `cancellation`, `requests` and `loop`, which use it.
"""
