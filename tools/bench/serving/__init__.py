"""Measurements of a whole server, seen by its clients over HTTP.

Each subcommand of `penstock bench` has a module of its name here, in this order: options, measurement, table, aims.
`load` and `storm` also measure a server that already runs (--url), `compare` starts those of other projects too; the
others start their own. `static_batch`, `bare_step` and `stream_profile` run in child processes, as the other side of
`static`, `floor` and `one_stream`.
"""
