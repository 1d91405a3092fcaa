"""`penstock serve`: backend and frontend under one supervisor, with models that sleep, hot upgrades and fleets.

`command` is the command and `options` are its options; `backend_children` starts, watches and replaces the backends.
`sleeping_models` decides which of several models are awake, `upgrade` replaces backends under load, and `fleet` places
servers on the nodes of a Ray cluster. May import frontend, backend, shm and `penstock.process`.
"""
