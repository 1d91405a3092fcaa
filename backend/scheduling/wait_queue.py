"""Sequences that wait to be admitted, in order of rank, or parked until another one has computed their prefix."""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.backend.kv_cache.prefix_cache import Awaited
    from penstock.backend.sequences.sequence import Sequence


class WaitQueue:
    """Each waiting sequence is here once: in the queue, or parked under one key. The cost of a call does not grow with
    the number of waiting sequences."""

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, Sequence]] = []
        self._num_stale = 0
        """Ended sequences that are still in the queue."""
        self._parked: dict[Awaited, dict[Sequence, None]] = {}
        self._key_of: dict[Sequence, Awaited] = {}
        self._deadlines: deque[tuple[int, Sequence]] = deque()
        """(deadline step, sequence), oldest first; entries may be stale."""

    def __len__(self) -> int:
        return len(self._queue) - self._num_stale + len(self._key_of)

    @property
    def num_parked(self) -> int:
        return len(self._key_of)

    def put(self, sequence: Sequence) -> None:
        """Add to the queue by (rank, order). A preempted sequence keeps both."""
        heapq.heappush(self._queue, (sequence.rank, sequence.order, sequence))

    def head(self) -> Sequence | None:
        """The next sequence in the queue, not counting parked ones."""
        while self._queue and self._queue[0][2].ended:
            heapq.heappop(self._queue)
            self._num_stale -= 1
        return self._queue[0][2] if self._queue else None

    def take_head(self) -> None:
        heapq.heappop(self._queue)

    def park_head(self, key: Awaited, deadline_step: int) -> None:
        """Move the head out of the queue until `unpark` is called with the key, or `unpark_overdue` with the deadline.

        The deadline never decreases from call to call.
        """
        sequence = heapq.heappop(self._queue)[2]
        self._deadlines.append((deadline_step, sequence))
        self._parked.setdefault(key, {})[sequence] = None
        self._key_of[sequence] = key

    def unpark(self, keys: Iterable[Awaited]) -> None:
        for key in keys:
            for sequence in self._parked.pop(key, ()):
                del self._key_of[sequence]
                self.put(sequence)

    def unpark_overdue(self, step: int) -> None:
        while self._deadlines and self._deadlines[0][0] <= step:
            _, sequence = self._deadlines.popleft()
            if (key := self._key_of.pop(sequence, None)) is not None:
                self._remove_parked(key, sequence)
                self.put(sequence)

    def _remove_parked(self, key: Awaited, sequence: Sequence) -> None:
        del self._parked[key][sequence]
        if not self._parked[key]:
            del self._parked[key]

    def forget(self, sequence: Sequence) -> None:
        """A waiting sequence has ended. The queue drops it at its turn, or when most of its entries are stale."""
        if (key := self._key_of.pop(sequence, None)) is not None:
            self._remove_parked(key, sequence)
            return
        self._num_stale += 1
        if self._num_stale > 64 and self._num_stale * 2 > len(self._queue):
            self._queue = [entry for entry in self._queue if not entry[2].ended]
            heapq.heapify(self._queue)
            self._num_stale = 0

    def sequences(self) -> list[Sequence]:
        """All waiting sequences in no order. For checks."""
        return [entry[2] for entry in self._queue if not entry[2].ended] + list(self._key_of)

    def parked(self) -> list[Sequence]:
        return list(self._key_of)

    def parked_keys(self) -> set[Awaited]:
        return set(self._parked)
