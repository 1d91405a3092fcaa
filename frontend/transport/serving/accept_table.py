"""Shares new connections among the workers of one listening socket: a worker takes one unless another has far fewer.

The workers share a table in memory, with a row for each. A worker writes in its row how many connections it has, and
how often it has looked at the listening socket. A worker that does not look is stopped or busy: the others wait for it
only briefly.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

from penstock.shm.memory.worker_table import WorkerTable

MAX_WAITS = 40
"""After leaving this many connections in vain for a worker, others leave it no more until it looks again."""
_CONNECTIONS, _LOOKS = 0, 1
"""Indices of a row's words. The first word is the number of connections plus one, or 0 if the worker takes none."""


class AcceptTable(WorkerTable):
    """The rows of all workers. This worker writes only its own."""

    label = "penstock-accept"
    words_per_worker = 8  # one cache line, so that workers do not slow each other

    def __init__(self, mapping: mmap.mmap, num_workers: int, worker: int) -> None:
        """Clears the row of an earlier worker with the same number. This worker counts from `open` on."""
        super().__init__(mapping, num_workers, worker)
        self._others = [start for start in self.starts if start != self.own_start]
        self._num_connections = 0
        self._num_starting = 0
        self._is_open = False
        self._waits: dict[int, tuple[int, int]] = {}
        """Rows for which connections were left: their looks then, and how often in vain since."""
        self.close()

    def open(self) -> None:
        """Show the others that this worker takes connections."""
        self._is_open = True
        self._publish()

    def close(self) -> None:
        """Show the others that this worker takes no connections."""
        self._is_open = False
        self.words[self.own_start + _CONNECTIONS] = 0

    @property
    def has_others(self) -> bool:
        """Whether another worker takes connections."""
        return any(self.words[row + _CONNECTIONS] for row in self._others)

    def set_connections(self, num_connections: int) -> None:
        self._num_connections = num_connections
        self._publish()

    def add_starting(self, change: int) -> None:
        """Count connections that are accepted, but that `set_connections` does not include yet."""
        self._num_starting += change
        self._publish()

    def may_accept(self) -> bool:
        """Return whether this worker should take the connection that waits, or leave it for one that has fewer."""
        self.words[self.own_start + _LOOKS] += 1
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
        """Note that this worker takes a connection that the less loaded workers have not taken."""
        for row, looks in self._less_loaded():
            seen_looks, num_waits = self._waits.get(row, (-1, 0))
            if seen_looks == looks:
                self._waits[row] = (looks, num_waits + 1)

    @property
    def _num_own(self) -> int:
        return self._num_connections + self._num_starting

    def _publish(self) -> None:
        if self._is_open:
            self.words[self.own_start + _CONNECTIONS] = self._num_own + 1

    def _less_loaded(self) -> Iterator[tuple[int, int]]:
        """Yield the row and the number of looks of each other worker that has far fewer connections."""
        for row in self._others:
            num_connections = self.words[row + _CONNECTIONS] - 1
            # With some slack, so that in a burst workers do not wait for each other after each connection.
            if num_connections >= 0 and num_connections + 2 + num_connections // 8 < self._num_own + 1:
                yield row, self.words[row + _LOOKS]
            else:
                self._waits.pop(row, None)
