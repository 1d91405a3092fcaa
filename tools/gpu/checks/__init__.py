"""The items that check: each finding passes or fails, and one failure fails the run.

They cover compilation, correctness, row invariance, memory sharing and compute-sanitizer. Some modules are also the
process that their item starts. Imports `cases`, `devices`, `items` and `results`. Start reading in `correctness.py`.
"""
