"""What a run records and shows: findings, goals, the baseline of an earlier run, report.json and report.md.

Nothing here imports torch when it is imported, so the parent process of a run needs neither torch nor a GPU. Imports
no other package of gpu-check. Start with `results`, which every section writes to.
"""
