"""One module for each endpoint, or for a few that belong together.

An endpoint is a function of an exchange and the context: it receives the body, decodes it, and answers. `context` holds
what all endpoints of a worker share; `answering` is where every endpoint that generates ends. `routes` and `openapi`
serve the table of routes, which is in `penstock.frontend.app`. May import every package of the frontend. Start reading
at `chat_completions.py`.
"""
