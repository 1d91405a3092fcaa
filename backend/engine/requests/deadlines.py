"""Finds the requests whose deadline has passed, among thousands."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MIN_ENTRIES = 64


class Deadlines:
    """A heap of (deadline, frontend, request id). Requests that end in time stay in it as stale entries."""

    def __init__(self, deadline_of: Callable[[int, int], float | None]) -> None:
        """deadline_of(frontend, request id) is the open request's deadline; None if it has none, or is not open."""
        self._deadline_of = deadline_of
        self._heap: list[tuple[float, int, int]] = []
        self._compact_at = _MIN_ENTRIES

    def note(self, frontend: int, request_id: int, deadline_s: float | None) -> None:
        """deadline_s of None is ignored."""
        if deadline_s is None:
            return
        if len(self._heap) >= self._compact_at:  # most entries are stale
            self._heap = [entry for entry in set(self._heap) if self._deadline_of(*entry[1:]) == entry[0]]
            heapq.heapify(self._heap)
            self._compact_at = _MIN_ENTRIES + 2 * len(self._heap)
        heapq.heappush(self._heap, (deadline_s, frontend, request_id))

    def passed(self, now_s: float) -> Iterator[tuple[int, int]]:
        """(frontend, request id) of each open request whose deadline has passed, once."""
        while self._heap and self._heap[0][0] <= now_s:
            deadline_s, frontend, request_id = heapq.heappop(self._heap)
            if self._deadline_of(frontend, request_id) == deadline_s:
                yield frontend, request_id

    def next_due_s(self, now_s: float, at_most_s: float) -> float:
        """Seconds until the next entry, which may be stale; at most at_most_s."""
        return min(at_most_s, max(0.0, self._heap[0][0] - now_s)) if self._heap else at_most_s
