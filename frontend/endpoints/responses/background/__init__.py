"""Responses that are generated whether or not a client listens.

`run` is one such response; `runs` are those of one worker. `event_log` sends their events to clients. `takeover` runs
the responses of workers that have ended again.
"""
