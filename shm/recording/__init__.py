"""The flight recorder's data: the records of a backend's loop, and the files that hold copies of them.

The backend writes records into a ring (`penstock.shm.memory.ring`); `penstock record` and the supervisor copy them into
files. `events.py` has the records of requests, `steps.py` those of steps; `live.py` follows a running engine through
its ring, which `rings.py` finds.

Start with `records.py`. The package may import `memory`, `process` and `messages`.
"""
