"""The sections that check: each finding passes or fails, and one failure fails the run.

They cover compilation, correctness, row invariance, memory sharing and compute-sanitizer. A module named `*_child` or
`*_peer` runs in a process that its section starts. Imports `cases`, `devices` and `reporting`. Start reading in
`correctness.py`.
"""
