"""Predicts when a sequence would get its first and its last token, by a coarse model of the scheduler."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Work(NamedTuple):
    """The work left for a sequence."""

    num_given: int
    """Known tokens that are not computed yet, at least 1 for a sequence that waits."""
    num_to_generate: int
    num_pages: int
    """Pages that it needs; the pages that it holds if it runs."""


@dataclass(frozen=True, slots=True)
class Room:
    """The limits on concurrent sequences, pages and tokens."""

    num_slots: int
    num_pages: int
    max_batch_tokens: int


class Forecast(NamedTuple):
    """Seconds from now."""

    first_token_s: float
    finish_s: float


def forecast(
    running: Sequence[Work], waiting: Sequence[Work], target: int, room: Room, step_s: Callable[[int], float]
) -> Forecast:
    """Predict for the sequence with this index in [*running, *waiting]. step_s gives the duration of a step by its
    tokens.

    Waiting sequences start in order, as slots and pages become free. Decodes go first in each step, and prompts share
    the rest. It takes a few microseconds for each sequence: runs of equal steps are simulated together.
    """
    model = _Model(running, waiting, room, step_s)
    while target not in model.finishes:
        model.advance()
    return Forecast(model.first_tokens.get(target, 0.0), model.finishes[target])


class _Model:
    """A coarse model of the scheduler: nothing is preempted, cancelled or added."""

    def __init__(
        self, running: Sequence[Work], waiting: Sequence[Work], room: Room, step_s: Callable[[int], float]
    ) -> None:
        self._works = [*running, *waiting]
        self._room = room
        self._step_s = step_s
        self._num_free_slots = room.num_slots - len(running)
        self._num_free_pages = room.num_pages - sum(work.num_pages for work in running)
        self._waiting = deque(range(len(running), len(self._works)))
        self._prompts: deque[list[int]] = deque()
        """[index, tokens left to compute], in order."""
        self._ends: list[tuple[int, int]] = []
        """(step after which it ends, index) of each sequence that decodes."""
        self._num_steps = 0
        self._now_s = 0.0
        self.first_tokens: dict[int, float] = {}
        """Index → when it got its first token since now."""
        self.finishes: dict[int, float] = {}
        for index, work in enumerate(running):
            if work.num_given > 1:
                self._prompts.append([index, work.num_given])
            else:
                heapq.heappush(self._ends, (work.num_to_generate, index))

    def advance(self) -> None:
        """Run steps until a sequence ends or a prompt is computed; with a long prompt, as many steps as are equal."""
        self._admit()
        if self._prompts:
            self._run_prompts()
        else:
            self._run_steps(self._ends[0][0] - self._num_steps, len(self._ends))
        while self._ends and self._ends[0][0] <= self._num_steps:
            index = heapq.heappop(self._ends)[1]
            self.finishes[index] = self._now_s
            self._num_free_slots += 1
            self._num_free_pages += self._works[index].num_pages

    def _admit(self) -> None:
        while self._waiting:
            index = self._waiting[0]
            work = self._works[index]
            is_idle = not (self._prompts or self._ends)  # then it starts, whatever the estimate of its pages is
            if not is_idle and not (self._num_free_slots > 0 and work.num_pages <= self._num_free_pages):
                return
            self._waiting.popleft()
            self._num_free_slots -= 1
            self._num_free_pages -= work.num_pages
            self._prompts.append([index, work.num_given])

    def _run_prompts(self) -> None:
        num_decodes = len(self._ends)
        budget = max(1, self._room.max_batch_tokens - num_decodes)
        if self._prompts[0][1] > budget:
            num_steps = (self._prompts[0][1] - 1) // budget
            if self._ends:
                num_steps = max(1, min(num_steps, self._ends[0][0] - self._num_steps))
            self._prompts[0][1] -= num_steps * budget
            self._run_steps(num_steps, num_decodes + budget)
            return
        left, computed = budget, []
        while self._prompts and self._prompts[0][1] <= left:
            index, num_tokens = self._prompts.popleft()
            left -= num_tokens
            computed.append(index)
        if self._prompts:
            self._prompts[0][1] -= left
            left = 0
        self._run_steps(1, num_decodes + budget - left)
        for index in computed:
            self.first_tokens[index] = self._now_s
            heapq.heappush(self._ends, (self._num_steps + self._works[index].num_to_generate - 1, index))

    def _run_steps(self, num_steps: int, num_tokens: int) -> None:
        self._num_steps += num_steps
        self._now_s += num_steps * self._step_s(num_tokens)
