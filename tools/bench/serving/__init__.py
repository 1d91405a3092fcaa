"""Measurements of a whole server, seen by its clients over HTTP.

Each subcommand of `penstock bench` has a module of its name here, in this order: options, measurement, table, aims.
`load` also measures a server that already runs (--url), `compare` starts those of other projects too; the others start
their own. `bursts` are shapes of `load`.
"""
