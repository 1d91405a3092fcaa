"""How frontends and the backend find each other and exchange messages: a unix socket, then ZeroMQ.

`rendezvous.py` (backend) and `join.py` (frontend) shake hands over the unix socket, whose end is the death notice.
`backend_link.py` and `frontend_link.py` carry the messages; only they and `zmq_sockets.py` import zmq. The backend's
state of one frontend is in `connected_frontend.py`, that of all in `frontend_table.py`. The package may import
`buffers`, `memory` and `messages`. Start with `backend_link`.
"""
