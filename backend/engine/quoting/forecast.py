"""Predicts when sequences get their first and their last token, by a coarse model of the scheduler."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


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
    """Seconds from now. finish_s is at least first_token_s."""

    first_token_s: float
    finish_s: float


class _Mark(NamedTuple):
    """The model's state after a number of steps."""

    num_steps: int
    now_s: float
    num_decodes: int
    num_free_slots: int
    num_free_pages: int


class Timeline:
    """The course of the sequences that are known now. It is modelled once, and each forecast looks it up.

    Waiting sequences start in order, as slots and pages become free. Decodes go first in each step, and prompts share
    the rest. Nothing is preempted, cancelled or added. It takes a few microseconds for each sequence: runs of equal
    steps are modelled together. Each step has one more decode: that of the sequence whose end is asked for.
    """

    def __init__(
        self,
        running: Sequence[Work],
        waiting: Sequence[Work],
        room: Room,
        step_s: Callable[[int], float],
        num_hidden: int = 0,
    ) -> None:
        """step_s gives the duration of a step by its tokens. num_hidden sequences wait behind the given ones, and start
        at the same rate."""
        self._room = room
        self._step_s = step_s
        self._num_hidden = num_hidden
        model = _Model(running, waiting, room, step_s)
        while model.is_busy:
            model.advance()
        self._first_tokens = model.first_tokens
        self._num_running = len(running)
        self._starts = model.starts
        self._marks = model.marks
        self._all_started = model.all_started

    def of_running(self, index: int, num_to_generate: int) -> Forecast:
        """Forecast the running sequence of this index, if it generates this many tokens more."""
        first_s = self._first_tokens.get(index)
        if first_s is None:  # it has its first token
            return Forecast(0.0, self._after(0.0, num_to_generate))
        return Forecast(first_s, self._after(first_s, num_to_generate - 1))

    def of_newcomer(self, work: Work, num_ahead: int, num_others: int = 0, num_other_tokens: int = 0) -> Forecast:
        """Forecast a sequence with num_ahead waiting ones before it. num_others belong to the same request, have
        num_other_tokens together to compute, and start before it."""
        place = num_ahead + num_others
        late_s, load = 0.0, 1 + num_others
        if place < len(self._starts):
            start_s = self._starts[place]
        elif self._num_hidden:
            start_s = self._when_free(1, work.num_pages)
            late_s = start_s * (place - len(self._starts)) / len(self._starts)
            load = self._room.num_slots
        else:
            width = min(self._room.num_slots, max(1, self._room.num_pages // max(1, work.num_pages)))
            num_rounds, rest = divmod(place - len(self._starts), width)
            load = min(load, width)
            start_s = self._when_free(rest + 1, (rest + 1) * work.num_pages)
            late_s = num_rounds * (work.num_to_generate + 1) * self._step_s(width)
        start_s = max(start_s, self._prompts_before(min(place, len(self._starts))))
        first_s = start_s + self._prompt_s(work.num_given + num_other_tokens, start_s)
        if late_s:
            finish_s = first_s + (work.num_to_generate - 1) * self._step_s(load)
        else:
            finish_s = self._after(first_s, work.num_to_generate - 1, load)
        return Forecast(first_s + late_s, finish_s + late_s)

    def _when_free(self, num_slots: int, num_pages: int) -> float:
        """The time at which all known sequences have started, and there is this much room; the last end if there never
        is."""

        def has_room(mark: _Mark) -> bool:
            return mark.num_free_slots >= num_slots and mark.num_free_pages >= num_pages

        return self._marks[min(self._place(True, has_room, self._all_started), len(self._marks) - 1)].now_s

    def _place(self, value: float, key: Callable[[_Mark], float], first: int = 0) -> int:
        """The first mark from `first` on whose key is at least the value."""
        return bisect_left(self._marks, value, lo=first, key=key)

    def _prompts_before(self, place: int) -> float:
        """The time at which the prompts before the waiting sequence of this place are computed."""
        if place:
            return self._first_tokens[self._num_running + place - 1]
        return max((self._first_tokens.get(index, 0.0) for index in range(self._num_running)), default=0.0)

    def _prompt_s(self, num_tokens: int, start_s: float) -> float:
        num_decodes = self._marks[min(self._place(start_s, _time), len(self._marks) - 1)].num_decodes
        budget = max(1, self._room.max_batch_tokens - num_decodes)
        num_full = (num_tokens - 1) // budget
        last_s = self._step_s(num_decodes + num_tokens - num_full * budget)
        return num_full * self._step_s(self._room.max_batch_tokens) + last_s

    def _after(self, begin_s: float, num_steps: int, load: int = 1) -> float:
        """The time num_steps steps after begin_s. Steps behind the last mark have `load` tokens."""
        last = self._marks[-1]
        if begin_s >= last.now_s:
            return begin_s + num_steps * self._step_s(load)
        end = num_steps + self._between(begin_s, _time, _steps)
        if end >= last.num_steps:
            return last.now_s + (end - last.num_steps) * self._step_s(load)
        return max(begin_s, self._between(end, _steps, _time))

    def _between(self, value: float, key: Callable[[_Mark], float], wanted: Callable[[_Mark], float]) -> float:
        """Interpolate linearly: the wanted number where the key has this value."""
        place = self._place(value, key)
        below, above = self._marks[max(0, place - 1)], self._marks[place]
        part = (key(above) - value) / ((key(above) - key(below)) or 1.0)
        return wanted(above) - part * (wanted(above) - wanted(below))


def _time(mark: _Mark) -> float:
    return mark.now_s


def _steps(mark: _Mark) -> int:
    return mark.num_steps


class _Model:
    """A coarse model of the scheduler."""

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
        self.starts: list[float] = []
        """When each waiting sequence got its slot."""
        self.first_tokens: dict[int, float] = {}
        """Index → when it got its first token since now."""
        for index, work in enumerate(running):
            if work.num_given > 1:
                self._prompts.append([index, work.num_given])
            else:
                heapq.heappush(self._ends, (work.num_to_generate, index))
        self.marks: list[_Mark] = []
        self.all_started = 0
        """The first mark at which all waiting sequences have started."""
        self._mark()

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting or self._prompts or self._ends)

    def _mark(self) -> None:
        room = self._num_free_slots, self._num_free_pages
        self.marks.append(_Mark(self._num_steps, self._now_s, len(self._ends), *room))

    def advance(self) -> None:
        """Run steps until a sequence ends or a prompt is computed; with a long prompt, as many steps as are equal."""
        self._admit()
        if self._prompts:
            self._run_prompts()
        else:
            self._run_steps(self._ends[0][0] - self._num_steps, len(self._ends))
        while self._ends and self._ends[0][0] <= self._num_steps:
            index = heapq.heappop(self._ends)[1]
            self._num_free_slots += 1
            self._num_free_pages += self._works[index].num_pages
        self._mark()

    def _admit(self) -> None:
        while self._waiting:
            index = self._waiting[0]
            work = self._works[index]
            is_idle = not (self._prompts or self._ends)  # then it starts, whatever the estimate of its pages is
            if not is_idle and not (self._num_free_slots > 0 and work.num_pages <= self._num_free_pages):
                return
            self._waiting.popleft()
            self.starts.append(self._now_s)
            self.all_started = len(self.marks)
            self._num_free_slots -= 1
            self._num_free_pages -= work.num_pages
            self._prompts.append([index, work.num_given])
            if not self._waiting:
                self._mark()

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
        self._now_s += num_steps * self._step_s(min(num_tokens + 1, self._room.max_batch_tokens))
