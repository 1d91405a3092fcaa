"""One module for each endpoint, or for a few that belong together.

An endpoint is a function of an exchange and the context: it receives the body, decodes it, and answers. `context` holds
what all endpoints of a worker share; every endpoint that generates ends in `answering`. `routes` finds the endpoint of
a path in the table of `penstock.frontend.app`; `docs` documents that table. May import every package of the frontend.
Start reading at `chat_completions.py`.
"""
