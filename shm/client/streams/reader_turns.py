"""Wakes the readers of streams a few at a time, so that many readers never hold the event loop for long."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

_LONG_TURN_S = 0.008
_MIN_READERS = 4
_FIRST_READERS = 32
_MAX_READERS = 256


class Waiting(Protocol):
    """A stream whose reader waits."""

    group: int

    def resume_reader(self) -> None: ...


class ReaderTurns:
    """Wakes a limited number of readers in each turn of the event loop.

    The limit halves after a long turn and grows after a short one. Groups of streams, such as the choices of a request,
    take turns, one stream at a time: a request with a hundred choices delays another no more than one stream would.
    While few readers are ready, each is woken at once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ready: OrderedDict[int, list[Waiting]] = OrderedDict()
        """By group; the first group is next. A dict would look through its deleted entries for the first."""
        self._limit = _FIRST_READERS
        self._num_woken = 0  # since the present turn began
        self._turn: asyncio.Handle | None = None
        self._turn_began_s = 0.0

    def wake(self, stream: Waiting) -> None:
        """Wake a reader that waits, now or in a later turn of the loop. Call once per wait."""
        if self._ready or self._num_woken >= self._limit:
            self.queue(stream)
            return
        self._num_woken += 1
        stream.resume_reader()
        if self._turn is None:
            self._begin()

    def queue(self, stream: Waiting) -> None:
        """Wake the reader in a later turn of the loop. Call once per wait."""
        group = self._ready.get(stream.group)
        if group is None:
            self._ready[stream.group] = [stream]
        else:
            group.append(stream)
        if self._turn is None:
            self._begin()

    def _begin(self) -> None:
        self._turn_began_s = self._clock()
        self._turn = asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """Wake the next readers. Runs in every turn of the loop until a turn wakes none."""
        now_s = self._clock()
        if now_s - self._turn_began_s > _LONG_TURN_S:
            self._limit = max(_MIN_READERS, self._limit // 2)
        elif self._num_woken >= self._limit:
            self._limit = min(_MAX_READERS, self._limit + max(1, self._limit // 4))
        self._turn_began_s = now_s
        self._num_woken = 0
        while self._ready and self._num_woken < self._limit:
            number, group = self._ready.popitem(last=False)
            stream = group.pop(0)
            if group:
                self._ready[number] = group  # behind the others
            self._num_woken += 1
            stream.resume_reader()
        self._turn = asyncio.get_running_loop().call_soon(self._next_turn) if self._num_woken else None
