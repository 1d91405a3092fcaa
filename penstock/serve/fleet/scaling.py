"""Computes the number of servers from the number of open requests."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

UP_WINDOW_S = 10.0
DOWN_WINDOW_S = 300.0


@dataclass(frozen=True, slots=True)
class Bounds:
    least: int
    most: int
    open_requests: int = 0
    """Target of running and waiting sequences for one server; 0 keeps the least number of servers."""


class Scaling:
    """Smooths the target: more servers once the load has needed them for UP_WINDOW_S, fewer once it has not for
    DOWN_WINDOW_S."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._asked: deque[tuple[float, int]] = deque()
        """When, and the number that the load at that moment asked for. A window's length, oldest first."""
        self.wanted = bounds.least

    def start_from(self, num_servers: int) -> None:
        """Begin with this many servers, within the bounds."""
        self.wanted = min(max(num_servers, self._bounds.least), self._bounds.most)

    def note(self, num_open: int, now_s: float) -> int:
        """Note the open requests of all servers; return the number of servers that should run."""
        bounds = self._bounds
        if not bounds.open_requests:
            return self.wanted
        needed = math.ceil(num_open / bounds.open_requests)
        self._asked.append((now_s, min(max(needed, bounds.least), bounds.most)))
        while self._asked[0][0] < now_s - DOWN_WINDOW_S:
            self._asked.popleft()
        lately = [number for then_s, number in self._asked if then_s >= now_s - UP_WINDOW_S]
        if now_s - self._asked[0][0] >= UP_WINDOW_S:
            self.wanted = max(self.wanted, min(lately))
        if now_s - self._asked[0][0] >= DOWN_WINDOW_S - UP_WINDOW_S:
            self.wanted = min(self.wanted, max(number for _, number in self._asked))
        return self.wanted
