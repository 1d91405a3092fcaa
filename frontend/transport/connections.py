"""Limits how many connections a worker has open, and closes the longest idle one when a new one needs its place."""

from __future__ import annotations

import logging
import resource
from typing import Protocol

logger = logging.getLogger("penstock.connections")

MAX_CONNECTIONS = 8192
RESERVED_FDS = 40
"""File descriptors not used for connections: about 25 that a worker itself has open, and those about to be closed."""
MIN_IDLE_S = 1.0
"""Idle time before a connection may be closed for a new one. Sooner, its first request may be on its way."""
_WARNS_AGAIN_BELOW = 0.9
"""Share of the limit. Once the number of connections falls to it, reaching the limit is logged again."""


class Closable(Protocol):
    """One connection."""

    def close_idle(self) -> None:
        """Close the connection, which is waiting for a request."""
        ...


def raise_fd_limit() -> int:
    """Raise this process's limit of file descriptors to its maximum; return how many connections that allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, hard - RESERVED_FDS))


class Connections:
    """The connections of one worker, at most `limit`. Times are seconds of the caller's clock."""

    def __init__(self, limit: int = MAX_CONNECTIONS) -> None:
        self._limit = limit
        self._open: set[Closable] = set()
        self._idle_since_s: dict[Closable, float] = {}
        """Connections that wait for a request, the longest idle first."""
        self._is_full = False

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Closable, now_s: float) -> bool:
        """Return False when the limit is reached and no idle connection can be closed.

        The connection counts until it is removed either way.
        """
        self._open.add(connection)
        if len(self._open) > self._limit and not self._close_longest_idle(now_s):
            return False
        self.set_idle(connection, now_s)
        return True

    def remove(self, connection: Closable) -> None:
        self._open.discard(connection)
        self._idle_since_s.pop(connection, None)
        if len(self._open) <= _WARNS_AGAIN_BELOW * self._limit:
            self._is_full = False

    def set_idle(self, connection: Closable, now_s: float) -> None:
        """Note that the connection waits for a request from now on."""
        self._idle_since_s.pop(connection, None)
        self._idle_since_s[connection] = now_s

    def set_busy(self, connection: Closable) -> None:
        self._idle_since_s.pop(connection, None)

    def _close_longest_idle(self, now_s: float) -> bool:
        """Return False when even the longest idle connection has been idle for less than MIN_IDLE_S."""
        if not self._is_full:
            self._is_full = True
            logger.warning("%d connections, the limit of this worker: idle ones are closed for new ones", self._limit)
        longest = next(iter(self._idle_since_s), None)
        if longest is None or now_s - self._idle_since_s[longest] < MIN_IDLE_S:
            return False
        del self._idle_since_s[longest]
        longest.close_idle()
        return True
