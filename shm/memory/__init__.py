"""Shared memory without names: memfds that the backend creates and hands over in the handshake.

`region.py` makes and maps them; `arena.py` carries prompts that are too long for a message, `board.py` counters.
`ledger.py` is private memory: it records who must give back what. The package may import `messages`. Start with
`board`.
"""
