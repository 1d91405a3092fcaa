"""When the next step is planned: as late as the device allows, so that whoever comes in the meantime is in it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

_SLACK_S = 0.0015
"""The loop sleeps by whole milliseconds, and is woken some time after that."""
_SHORTEST_WAIT_S = 0.0001
_MARGIN = 2.0
"""How many times as long as lately the planning may take."""
_DECAY = 0.98
"""A step that took long to plan is remembered for some fifty."""
_NUM_REMEMBERED = 4
_TOKENS_APART = 32
"""Steps of more tokens than twice that are told apart only by so many."""


class StepTiming:
    """How long steps take, and their planning. For the engine's thread.

    A guess that is too low plans early, as a plan is always possible; one that is too high leaves the device idle for
    as long as planning takes, no longer: a step's end wakes the loop.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        """Size of a step → the durations of the last ones."""
        self._sizes: list[int] = []
        """Of which there were any, rising."""
        self._in_flight: deque[int] = deque()
        """The sizes of steps planned and not taken in."""
        self._plan_s = 0.0
        self._launch_s = 0.0
        """CPU time that the host lately needed for a step before the device could begin with it, at most."""

    def spare_s(self, running_s: float) -> float:
        """How long the next plan can wait, when the running step has run for running_s; 0 is not at all."""
        expected_s = [self._expected_s(size) for size in self._in_flight]
        if expected_s:  # one that takes longer than thought says nothing of those behind it
            expected_s[0] = max(0.0, expected_s[0] - running_s)
        spare_s = sum(expected_s) - _MARGIN * (self._plan_s + self._launch_s) - _SLACK_S
        return spare_s if spare_s > _SHORTEST_WAIT_S else 0.0

    def note_plan(self, num_tokens: int, plan_s: float) -> None:
        """A step was given to the executor; plan_s is the CPU time that its planning took."""
        self._in_flight.append(_size(num_tokens))
        self._plan_s = max(plan_s, _DECAY * self._plan_s)

    def note_result(self, num_tokens: int, step_s: float, launch_s: float) -> None:
        """Of the next of the steps that were planned: what ran of it, how long, and the CPU time of its launch."""
        self._in_flight.popleft()
        self._launch_s = max(launch_s, _DECAY * self._launch_s)
        if not num_tokens:
            return
        size = _size(num_tokens)
        if size not in self._recent:
            self._recent[size] = deque(maxlen=_NUM_REMEMBERED)
            insort(self._sizes, size)
        self._recent[size].append(step_s)

    def _expected_s(self, size: int) -> float:
        """At least. Of a size that has not been seen: a larger step takes longer, but not by more than it is larger."""
        if (recent := self._recent.get(size)) is not None:
            return min(recent)
        at = bisect_left(self._sizes, size)
        below_s = min(self._recent[self._sizes[at - 1]]) if at else 0.0
        if at == len(self._sizes):
            return below_s
        above_s = min(self._recent[self._sizes[at]])
        return min(above_s, max(below_s, above_s * size / self._sizes[at]))


def _size(num_tokens: int) -> int:
    return num_tokens if num_tokens <= 2 * _TOKENS_APART else num_tokens // _TOKENS_APART * _TOKENS_APART
