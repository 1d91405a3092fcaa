"""How frontends and the backend find each other and exchange messages: a unix socket, then ZeroMQ.

`rendezvous.py` (backend) and `join.py` (frontend) shake hands over the unix socket, whose end is the death notice.
`backend_link.py` and `frontend_link.py` carry the messages; only they, `zmq_sockets.py` and `kv_event_publisher.py`,
which tells routers about pages, import zmq. In the backend, `connected_frontend.py` holds the state of one frontend,
`frontend_table.py` the table of all. The package may import `buffers`, `memory` and `messages`. Start with
`backend_link`.
"""
