"""Sequences that wait to be admitted, in order of rank; some are parked until another has computed what they need."""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.backend.kv_cache.prefix_cache import Awaited
    from penstock.backend.sequences.sequence import Sequence


class WaitQueue:
    """Each sequence is here once: in the queue or parked under one key. Costs do not grow with how many wait."""

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, Sequence]] = []
        self._num_gone = 0
        self._parked: dict[Awaited, dict[Sequence, None]] = {}
        self._key_of: dict[Sequence, Awaited] = {}
        self._overdue: deque[tuple[int, Sequence]] = deque()
        """Until when those wait that were parked, the next to be put back first; some have been put back since."""

    def __len__(self) -> int:
        return len(self._queue) - self._num_gone + len(self._key_of)

    @property
    def num_parked(self) -> int:
        return len(self._key_of)

    def put(self, sequence: Sequence) -> None:
        """In the order of (rank, order); what was preempted comes back with the rank it had."""
        heapq.heappush(self._queue, (sequence.rank, sequence.order, sequence))

    def head(self) -> Sequence | None:
        """The next in the queue; parked ones are passed over."""
        while self._queue and self._queue[0][2].ended:
            heapq.heappop(self._queue)
            self._num_gone -= 1
        return self._queue[0][2] if self._queue else None

    def take_head(self) -> None:
        heapq.heappop(self._queue)

    def park_head(self, key: Awaited, until: int) -> None:
        """Out of the queue until `unpark` is called with the key, or `unpark_overdue` with `until`, which never falls
        from call to call."""
        sequence = heapq.heappop(self._queue)[2]
        self._overdue.append((until, sequence))
        self._parked.setdefault(key, {})[sequence] = None
        self._key_of[sequence] = key

    def unpark(self, keys: Iterable[Awaited]) -> None:
        for key in keys:
            for sequence in self._parked.pop(key, ()):
                del self._key_of[sequence]
                self.put(sequence)

    def unpark_overdue(self, now: int) -> None:
        while self._overdue and self._overdue[0][0] <= now:
            _, sequence = self._overdue.popleft()
            if (key := self._key_of.pop(sequence, None)) is not None:
                self._remove_parked(key, sequence)
                self.put(sequence)

    def _remove_parked(self, key: Awaited, sequence: Sequence) -> None:
        del self._parked[key][sequence]
        if not self._parked[key]:
            del self._parked[key]

    def forget(self, sequence: Sequence) -> None:
        """A waiting sequence has ended. One in the queue is dropped when its turn comes, or when such are the most."""
        if (key := self._key_of.pop(sequence, None)) is not None:
            self._remove_parked(key, sequence)
            return
        self._num_gone += 1
        if self._num_gone > 64 and self._num_gone * 2 > len(self._queue):
            self._queue = [entry for entry in self._queue if not entry[2].ended]
            heapq.heapify(self._queue)
            self._num_gone = 0

    def sequences(self) -> list[Sequence]:
        """All of them, in no order; for checks."""
        return [entry[2] for entry in self._queue if not entry[2].ended] + list(self._key_of)

    def parked(self) -> list[Sequence]:
        return list(self._key_of)

    def parked_keys(self) -> set[Awaited]:
        return set(self._parked)
