"""The engine view: a page that shows the scheduler's work, and the stream of events that it reads.

`feed.py` has the endpoint and follows one backend for all viewers of this worker, `updates.py` defines the events. They
contain no prompt, no token and no other tenant's name.
"""
