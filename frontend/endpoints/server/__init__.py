"""Endpoints about the server and about other requests: health, metrics, models, quotes, streams, cancellation.

Also the engine view: a page that shows the scheduler's work (`engine_page/`), and the stream of events that it reads.
`engine_feed` follows one backend for all viewers of this worker, `engine_updates` defines the events. They contain no
prompt, no token and no other tenant's name.
"""
