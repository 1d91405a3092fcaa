"""Hot upgrade: `penstock serve` replaces its backends by new ones, with new options or code, under load.

`command` is `penstock upgrade`, `control` the socket on which the server receives the changes, `new_options` checks
them, and `succession` replaces one backend after the other. May import backend and shm.
"""
