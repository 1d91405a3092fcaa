"""How many connections a worker has at once, and which of them makes room when there is no more."""

from __future__ import annotations

import logging
import resource
from typing import Protocol

_log = logging.getLogger("penstock.connections")

MAX_CONNECTIONS = 8192
RESERVED_FDS = 40
"""Not for connections: some 25 that a worker has open by itself, and those that are closed in a moment."""
LEAST_IDLE_S = 1.0
"""A connection may be silent for so long before it makes room: its first request may be on its way."""
_EPISODE_ENDS_BELOW = 0.9


class Closable(Protocol):
    """One connection."""

    def close_idle(self) -> None: ...


def raise_fd_limit() -> int:
    """Raises this process's limit of file descriptors as far as it may; returns how many connections that allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, hard - RESERVED_FDS))


class Connections:
    """The connections of one worker, at most `limit`. Times are of the caller's clock, in seconds."""

    def __init__(self, limit: int = MAX_CONNECTIONS) -> None:
        self._limit = limit
        self._open: set[Closable] = set()
        self._idle_since_s: dict[Closable, float] = {}  # those that wait for a request, the longest first
        self._is_crowded = False

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Closable, now_s: float) -> bool:
        """False if there is no room for it and none can be made; it counts until it is removed all the same."""
        self._open.add(connection)
        if len(self._open) > self._limit and not self._make_room(now_s):
            return False
        self.set_idle(connection, now_s)
        return True

    def remove(self, connection: Closable) -> None:
        self._open.discard(connection)
        self._idle_since_s.pop(connection, None)
        if len(self._open) <= _EPISODE_ENDS_BELOW * self._limit:
            self._is_crowded = False

    def set_idle(self, connection: Closable, now_s: float) -> None:
        """It waits for a request, from now on."""
        self._idle_since_s.pop(connection, None)
        self._idle_since_s[connection] = now_s

    def set_busy(self, connection: Closable) -> None:
        self._idle_since_s.pop(connection, None)

    def _make_room(self, now_s: float) -> bool:
        """Closes the connection that has been idle for longest, if it is one that can be spared."""
        if not self._is_crowded:
            self._is_crowded = True
            _log.warning("%d connections, all that this worker takes: idle ones are closed for new ones", self._limit)
        longest = next(iter(self._idle_since_s), None)
        if longest is None or now_s - self._idle_since_s[longest] < LEAST_IDLE_S:
            return False
        del self._idle_since_s[longest]
        longest.close_idle()
        return True
