"""`penstock top`: shows a running server's work in the terminal.

It reads the flight recorder, at no cost to the server. `snapshot.py` sums up the recorder's live state, `frame.py`
draws it, `keys.py` reads the keyboard and `operator.py` cancels requests. Start with `command.py`.
"""
