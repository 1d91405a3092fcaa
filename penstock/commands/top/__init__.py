"""`penstock top`: shows a running server's work in the terminal.

It reads the flight recorder, at no cost to the server. `snapshot.py` sums up the recorder's live state, `frame.py`
draws it. `command.py` reads the keyboard and cancels requests; start there.
"""
