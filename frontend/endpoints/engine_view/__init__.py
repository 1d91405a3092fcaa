"""The engine view: a page that shows what the scheduler does, and the stream of events that it reads.

`stream.py` has the endpoint, `feed.py` follows one backend for all viewers of this worker, `updates.py` has what is
sent. No prompt, no token and no other tenant's name is in it.
"""
