"""Shares new connections among the workers of one listening socket: each takes only while no other has much less.

The workers share a table in memory that has a row for each. Only its worker writes a row: how many connections it has,
and a count of the times that it looked at the listening socket. A worker that does not look, because it is stopped or
busy, is waited for only briefly.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from penstock.shm.memory import region

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_WAITS = 40
"""Connections that are left for a worker in vain before no more are, until it looks again."""
_ROW_WORDS = 8
"""One cache line, so that workers do not slow each other."""
_CONNECTIONS, _LOOKS = 0, 1
"""Words of a row. The first is the number of connections plus one; 0 is a worker that takes none."""


class AcceptTable:
    """The rows of all workers. This worker writes only its own."""

    def __init__(self, mapping: mmap.mmap, num_workers: int, worker: int) -> None:
        """Clears the row of an earlier worker with the same number. This worker counts from `open` on."""
        self._words = memoryview(mapping).cast("Q")
        self._own = _ROW_WORDS * worker
        self._others = [_ROW_WORDS * other for other in range(num_workers) if other != worker]
        self._num_connections = 0
        self._num_starting = 0
        self._is_open = False
        self._waits: dict[int, tuple[int, int]] = {}
        """Rows that connections were left for: their looks then, and how often in vain since."""
        self.close()

    @staticmethod
    def create_fd(num_workers: int) -> int:
        """Return the fd of a table for so many workers. The caller owns it."""
        fd = region.create("penstock-accept", 8 * _ROW_WORDS * num_workers)
        region.seal(fd)
        return fd

    @classmethod
    def alone(cls) -> AcceptTable:
        """Return a table for the only worker of a socket."""
        return cls(mmap.mmap(-1, 8 * _ROW_WORDS), 1, 0)

    @classmethod
    def attach(cls, fd: int, num_workers: int, worker: int) -> AcceptTable:
        """Raises RegionError."""
        return cls(region.attach(fd, 8 * _ROW_WORDS * num_workers, writable=True), num_workers, worker)

    def open(self) -> None:
        """Show the others that this worker takes connections."""
        self._is_open = True
        self._publish()

    def close(self) -> None:
        """Show the others that this worker takes no more."""
        self._is_open = False
        self._words[self._own + _CONNECTIONS] = 0

    @property
    def has_others(self) -> bool:
        """Whether another worker takes connections."""
        return any(self._words[row + _CONNECTIONS] for row in self._others)

    def set_connections(self, num_connections: int) -> None:
        self._num_connections = num_connections
        self._publish()

    def add_starting(self, change: int) -> None:
        """Count connections that are accepted and not yet among those of `set_connections`."""
        self._num_starting += change
        self._publish()

    def may_accept(self) -> bool:
        """Return whether this worker is to take the connection that waits, or leave it for one with fewer."""
        self._words[self._own + _LOOKS] += 1
        is_next = True
        for row, looks in self._less_loaded():
            seen_looks, num_waits = self._waits.get(row, (-1, 0))
            if seen_looks != looks:
                self._waits[row] = (looks, 0)
                is_next = False
            elif num_waits < MAX_WAITS:
                is_next = False
        return is_next

    def note_wait_in_vain(self) -> None:
        """Note that this worker takes a connection after having left it for those with fewer."""
        for row, looks in self._less_loaded():
            seen_looks, num_waits = self._waits.get(row, (-1, 0))
            if seen_looks == looks:
                self._waits[row] = (looks, num_waits + 1)

    @property
    def _num_own(self) -> int:
        return self._num_connections + self._num_starting

    def _publish(self) -> None:
        if self._is_open:
            self._words[self._own + _CONNECTIONS] = self._num_own + 1

    def _less_loaded(self) -> Iterator[tuple[int, int]]:
        """Yield the row and the looks of each other worker that has much less than this one."""
        for row in self._others:
            num_connections = self._words[row + _CONNECTIONS] - 1
            # Some slack, so that in a burst no worker has to wait for another after each connection.
            if num_connections >= 0 and num_connections + 2 + num_connections // 8 < self._num_own + 1:
                yield row, self._words[row + _LOOKS]
            else:
                self._waits.pop(row, None)
