"""`penstock replay`: the requests of a recording run through the real scheduler again, with a simulated clock.

`arrivals.py` reads from a recording what came in and how it ended, `made_up.py` makes prompts that share what the
recorded ones shared, `backend.py` turns the loop, `comparison.py` compares two recordings and `model.py` loads a
forward pass. Start with `command.py`.
"""
