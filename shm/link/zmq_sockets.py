"""The ZeroMQ sockets of both ends of the link. Neither end ever blocks.

A frontend has a DEALER; the backend has one ROUTER beside its rendezvous socket. Credits bound what is in flight to a
frontend: one StepOutputs takes one credit. The high-water marks are above the credit, so they are never reached.
"""

from __future__ import annotations

import zmq

MAX_REQUESTS_IN_FLIGHT = 1024
"""Unread messages of one frontend to the backend; the frontend keeps the rest in its outbox."""
HANDSHAKE_TIMEOUT_S = 3.0

if zmq.zmq_version_info() < (4, 3, 5):
    raise ImportError(f"libzmq {zmq.zmq_version()} is too old; 4.3.5 or later is needed")


def new_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, *, max_unsent: int, max_unread: int, max_message_bytes: int
) -> zmq.Socket[bytes]:
    zsocket = context.socket(kind)
    zsocket.setsockopt(zmq.LINGER, 0)
    zsocket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
    zsocket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_TIMEOUT_S * 1000))
    zsocket.setsockopt(zmq.SNDHWM, max_unsent)
    zsocket.setsockopt(zmq.RCVHWM, max_unread)
    return zsocket


def receive(zsocket: zmq.Socket[bytes], num_parts: int) -> list[bytes] | None:
    """One message, or None. Drops parts beyond num_parts + 1, so that a surplus shows in the length."""
    try:
        parts = [zsocket.recv(zmq.NOBLOCK)]
    except zmq.Again:
        return None
    while zsocket.getsockopt(zmq.RCVMORE):
        part = zsocket.recv(zmq.NOBLOCK)
        if len(parts) <= num_parts:
            parts.append(part)
    return parts
