"""Requests, from their submission to their end: taken in, given a sequence, delivered, cancelled.

Start with `handling`, which connects the parts around one `request_table`. `intake` takes a request in, within
`limits`; `delivery` and `vector_delivery` send its results, `cancellation` and `deadlines` end it early, and
`stream_table` has the streams that a reader may resume.
May import `steps`, `quoting`, `coalescer`, `recorder` and `interfaces` of the engine, and what that may.
"""
