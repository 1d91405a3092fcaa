"""Limits how many connections a worker has open, and closes the least useful one when a new one needs its place.

A connection is idle while it waits for a further request, incomplete until a request's head has arrived (from the
start, TLS handshake included, and again from the first byte of each further request), and busy otherwise.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable
from typing import Protocol

from penstock.frontend.transport.incomplete import Incomplete

logger = logging.getLogger("penstock.connections")

MAX_CONNECTIONS = 8192
RESERVED_FDS = 96
"""File descriptors not used for connections: about 35 that a worker itself has open, and those about to be closed."""
MIN_IDLE_S = 1.0
"""Idle time before a connection may be closed for a new one. Earlier, its first request may be on its way."""
_WARNS_AGAIN_BELOW = 0.9
"""Share of the limit. Once the number of connections falls to it, the warning is logged again at the limit."""


_INCOMPLETE_PART = 2
"""Half of the connections may be incomplete."""


class Closable(Protocol):
    """One connection."""

    def close_for_another(self) -> None:
        """Close the connection, which is idle or incomplete."""

    def shutdown(self) -> None:
        """Close the connection without haste, for nobody needs its place; after its answer if it is busy."""


def raise_fd_limit() -> int:
    """Raise this process's limit of file descriptors to its maximum; return how many connections that allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, hard - RESERVED_FDS))


class Connections:
    """The connections of one worker, at most `limit`. Times are seconds of the caller's clock."""

    def __init__(self, limit: int = MAX_CONNECTIONS, on_change: Callable[[int], None] | None = None) -> None:
        """on_change receives the new number of connections."""
        self._limit = limit
        self._on_change = on_change
        self._open: set[Closable] = set()
        self._idle_since_s: dict[Closable, float] = {}
        """The longest idle first."""
        self._incomplete = Incomplete[Closable](max(1, limit // _INCOMPLETE_PART), _close)
        self._is_full = False
        self.is_draining = False
        """The server stops: a request that arrives is still answered, as the last of its connection."""

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Closable, address: bytes, now_s: float) -> bool:
        """Count a new, incomplete connection until it is removed. Return False when it has to be refused: the limit is
        reached, and no other can be closed."""
        self._open.add(connection)
        self._note_change()
        if len(self._open) > self._limit and not self._make_room(address, now_s):
            return False
        self._incomplete.add(connection, address, now_s)
        return True

    def remove(self, connection: Closable) -> None:
        self._open.discard(connection)
        self._note_change()
        self._idle_since_s.pop(connection, None)
        self._incomplete.discard(connection)
        if len(self._open) <= _WARNS_AGAIN_BELOW * self._limit:
            self._is_full = False

    def replace(self, old: Closable, new: Closable) -> None:
        """Give the place of a connection, which is not idle afterwards, to another protocol of the same socket."""
        self.set_busy(old)
        self._open.discard(old)
        self._open.add(new)

    def set_idle(self, connection: Closable, now_s: float) -> None:
        """Note that the connection waits for a further request from now on."""
        self._incomplete.discard(connection)
        self._idle_since_s.pop(connection, None)
        self._idle_since_s[connection] = now_s

    def set_incomplete(self, connection: Closable, address: bytes, now_s: float) -> None:
        """Note that the start of a head has arrived, unless that is known already. Another connection may be closed for
        it."""
        self._idle_since_s.pop(connection, None)
        self._incomplete.add(connection, address, now_s)

    def set_busy(self, connection: Closable) -> None:
        self._idle_since_s.pop(connection, None)
        self._incomplete.discard(connection)

    def start_draining(self) -> None:
        self.is_draining = True
        for connection in list(self._open):
            if connection not in self._idle_since_s and connection not in self._incomplete:
                connection.shutdown()

    def close_idle(self, since_s: float) -> None:
        """Close connections that have been idle since this time or longer."""
        self._shut_down([connection for connection, at_s in self._idle_since_s.items() if at_s <= since_s])

    def close_incomplete(self, since_s: float) -> None:
        """Close connections that have been incomplete since this time or longer."""
        self._shut_down(self._incomplete.older(since_s))

    def _shut_down(self, connections: list[Closable]) -> None:
        for connection in connections:
            self.set_busy(connection)
            connection.shutdown()

    def _note_change(self) -> None:
        if self._on_change is not None:
            self._on_change(len(self._open))

    def _make_room(self, address: bytes, now_s: float) -> bool:
        """Close the longest idle connection, else the oldest incomplete one. Return False if both are too young."""
        if not self._is_full:
            self._is_full = True
            logger.warning("%d connections, the limit of this worker: idle ones are closed for new ones", self._limit)
        longest = next(iter(self._idle_since_s), None)
        if longest is None or now_s - self._idle_since_s[longest] < MIN_IDLE_S:
            return self._incomplete.make_room(address, now_s)
        del self._idle_since_s[longest]
        longest.close_for_another()
        return True


def _close(connection: Closable) -> None:
    connection.close_for_another()
