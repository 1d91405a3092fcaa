"""HTTP requests and their answers; nothing here knows of models.

`exchange` is one request with its answer, `disconnect` notices a client that hangs up, `incomplete` bounds the
unfinished input of clients, `sse` writes event streams, and `errors` lists every error that a client can see.
`open_exchanges` watches over all requests of a worker. `serving` brings them over sockets; nothing here imports it.

Imports nothing else of the frontend. Start reading at `exchange.py`.
"""
