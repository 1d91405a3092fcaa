"""HTTP over TCP and Unix sockets, with and without TLS, as uvicorn speaks it; nothing here knows of models.

`listening` opens the socket, `server` runs uvicorn on it, `connections`, `http_limits` and `tls_handshakes` bound what
a client can hold. `exchange` is one request with its answer, `disconnect` notices a client that hangs up, `sse` writes
event streams, and `errors` lists every error that a client can see. Imports nothing else of the frontend. Start reading
at `exchange.py`.
"""
