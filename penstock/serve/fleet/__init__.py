"""Servers on several machines: Ray places and restarts them, HAProxy or nginx spreads requests over them.

`command` is `penstock ray`, `keeper` the loop behind `up`; `cluster` is the keeper's interface to Ray, and only
`ray_cluster` imports it. `server_actor` runs one `penstock serve` on a node. `router` writes the configuration of the
proxy from `templates/` and reloads it.

May import backend, frontend and shm.
"""
