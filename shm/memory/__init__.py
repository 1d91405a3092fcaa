"""Shared memory without names: memfds that one process creates and hands over to others.

`region.py` makes and maps them. The backend hands over `arena.py`, which carries prompts that are too long for a
message, and `board.py`, which has counters; a command gives its workers a `worker_table.py`. `fd_mailbox.py` keeps
memfds for processes that come later. `ledger.py` is private memory: it records which owner must give back which
resource.

The package may import `messages`. Start with `board`.
"""
