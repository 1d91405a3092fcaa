"""HTTP requests and their answers; nothing here knows of models.

`exchange` is one request with its answer, `disconnect` notices a client that hangs up, `incomplete` bounds what clients
have begun and not completed, `sse` writes event streams, and `errors` lists every error that a client can see.
`open_exchanges` watches over all requests of a worker. How they come over sockets is `serving`'s, which nothing here
imports. Imports nothing else of the frontend. Start reading at `exchange.py`.
"""
