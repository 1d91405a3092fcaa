"""An HTTP load generator for OpenAI endpoints.

`workload` draws the requests of a run from a seed, `target` encodes them for one server, `sending` sends them in a
closed or an open loop, `http_client` puts a time stamp on every event, and `stats` turns the observed requests into
one row of figures. Works with any server; imports nothing of the rest of `bench` but its error.
"""
