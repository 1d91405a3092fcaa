"""`penstock record` and `penstock timeline`: readers of the flight recorder.

The backend writes records into a ring (`penstock.shm.recording`). `command` copies them into a file, `history` puts
a recording together again, and `timeline` draws it. Start with `command`.
"""
