"""`penstock record`, `penstock timeline` and the crash files of `penstock serve`: readers of the flight recorder.

The backend writes records into a ring (`penstock.shm.recording`). `rings.py` finds the rings of running servers,
`crash_files.py` writes the last seconds of one, `history.py` puts a recording together again. Start with `command.py`.
"""
