"""Scheduling: which sequences run in the next step, and how many tokens of each.

`Scheduler.plan` makes one `Plan` per step from the running sequences and the head of the `WaitQueue`. It decides on
slots, pages and the token budget, and preempts when pages run out. The package knows no model and no link. It imports
`kv_cache` and `sequences`. Start with `scheduler.py`.
"""
