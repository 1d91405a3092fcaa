"""Support for all measurements: the run, its report and the server under test.

`run` shows progress, collects results and ends with the report; `report` prints tables and writes JSON; `machine`
describes the machine that the figures come from. `server` starts `penstock serve` as the server under test and `peers`
those of other projects, both as a `server_process`. `processes` reads the CPU time of their processes, `foreign_cpu`
that of all others, and `counters` the backend's own counters. `generator_processes` sends load from several processes,
and `job_child` runs a model in another.

Imports `load_generator`, and no measurement.
"""
