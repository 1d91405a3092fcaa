"""Serves HTTP over TCP and Unix sockets, with and without TLS, as uvicorn speaks it.

`listening` opens the socket, `server` runs uvicorn on it, `acceptor` shares new connections among workers by the counts
in `accept_table`. `connections`, `http_limits` and `tls_handshakes` bound what a client can hold. Start reading at
`server.py`.
"""
