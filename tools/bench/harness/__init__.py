"""Support for all measurements: the run, its report and the server under test.

`run` shows progress, collects results and ends with the report; `report` prints tables and writes JSON; `machine`
describes the machine that the figures come from. `server` starts `penstock serve` as the server under test and `peers`
those of other projects, both as a `server_process`. `foreign_cpu` reads the CPU time of all other processes, `counters`
the backend's own counters, and `comparison` holds the results of servers that take turns.

Imports `load_generator`, and no measurement.
"""
