"""Decides when to plan the next step: as late as the device allows, so that it includes the latest requests."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from statistics import median

_MIN_SLACK_S = 0.0015
"""The loop sleeps whole milliseconds and wakes a little later."""
_MAX_SLACK_S = 0.006
_MORE_SLACK_S = 0.0005
"""Added after a plan that was late. On two cores the loop waits for a core and for the interpreter's lock."""
_LESS_SLACK_S = 0.00002
"""Removed per plan: one plan in 25 may be late."""
_SHORTEST_WAIT_S = 0.0001
_SHORT_S = 0.003
"""Steps of less are planned at once: a request gains at most this by a late plan, and the host's caches turn cold."""
_MARGIN = 2.0
"""Planning is assumed to take at most this many times as long as recently."""
_GAP_S = 0.0003
"""The first value of `StepTiming.gap_s`."""
_GAP_WEIGHT = 0.1
_DECAY = 0.98
"""Per step: a slow planning is remembered for about fifty steps."""
_NUM_REMEMBERED = 4
"""Durations kept per size of step."""
_BUCKET_TOKENS = 32
"""Above twice this many tokens, sizes of steps are rounded down to a multiple of this."""


class StepTiming:
    """Measures how long steps and their planning take. Used by the main thread only.

    An estimate that is too short plans early, which does no harm. One that is too long leaves the device idle only for
    as long as planning takes, because the end of a step wakes the loop.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        """Size of a step in tokens → the durations of the last ones in seconds."""
        self._sizes: list[int] = []
        """Sizes that were seen, ascending."""
        self._in_flight: deque[int] = deque()
        """Sizes of the steps that are planned and not applied yet."""
        self._slack_s = _MIN_SLACK_S
        self._plan_s = 0.0
        self._launch_s = 0.0
        """The longest recent CPU time of a launch, before which the device cannot begin; it decays."""
        self.gap_s = _GAP_S
        """From the end of a step to the launch of the next, if that is planned only then; an average."""

    def spare_s(self, running_s: float) -> float:
        """Seconds that the next plan can wait while the running step has run for running_s; 0 means plan now."""
        expected_s = [self._expected_s(size) for size in self._in_flight]
        if sum(expected_s) < _SHORT_S:
            return 0.0
        if expected_s:  # a step that takes longer than expected says nothing about the steps behind it
            expected_s[0] = max(0.0, expected_s[0] - running_s)
        spare_s = sum(expected_s) - _MARGIN * (self._plan_s + self._launch_s) - self._slack_s
        return spare_s if spare_s > _SHORTEST_WAIT_S else 0.0

    def note_plan(self, num_tokens: int, plan_s: float) -> None:
        """A step was given to the executor. plan_s is the CPU time of its planning."""
        self._in_flight.append(_size(num_tokens))
        self._plan_s = max(plan_s, _DECAY * self._plan_s)
        self._slack_s = max(_MIN_SLACK_S, self._slack_s - _LESS_SLACK_S)

    def note_gap(self, gap_s: float) -> None:
        self.gap_s += _GAP_WEIGHT * (gap_s - self.gap_s)

    def note_late(self) -> None:
        """Note that the device was idle when a delayed plan came."""
        self._slack_s = min(_MAX_SLACK_S, self._slack_s + _MORE_SLACK_S)

    def note_result(self, num_tokens: int, step_s: float, launch_s: float) -> None:
        """Note that the oldest planned step has ended: num_tokens of it ran, 0 if it failed; launch_s is CPU time."""
        self._in_flight.popleft()
        self._launch_s = max(launch_s, _DECAY * self._launch_s)
        if not num_tokens:
            return
        size = _size(num_tokens)
        if size not in self._recent:
            self._recent[size] = deque(maxlen=_NUM_REMEMBERED)
            insort(self._sizes, size)
        self._recent[size].append(step_s)

    def typical_s(self, num_tokens: int) -> float | None:
        """The expected duration of a step with num_tokens, interpolated between the nearest sizes; None before the
        first step."""
        if not self._sizes:
            return None
        size = _size(num_tokens)
        at = bisect_left(self._sizes, size)
        if at == len(self._sizes):
            return self._extrapolated_s(size)
        above, above_s = self._sizes[at], median(self._recent[self._sizes[at]])
        if above == size or not at:
            return above_s
        below, below_s = self._sizes[at - 1], median(self._recent[self._sizes[at - 1]])
        return below_s + (above_s - below_s) * (size - below) / (above - below)

    def _extrapolated_s(self, size: int) -> float:
        """The duration of a step larger than all seen.

        It lies on the line through the smallest and the largest size, and is at most proportional to the size.
        """
        smallest, largest = self._sizes[0], self._sizes[-1]
        largest_s = median(self._recent[largest])
        per_token_s = largest_s / largest
        if smallest < largest:
            slope_s = (largest_s - median(self._recent[smallest])) / (largest - smallest)
            per_token_s = min(per_token_s, max(0.0, slope_s))
        return largest_s + (size - largest) * per_token_s

    def _expected_s(self, size: int) -> float:
        """A lower estimate. An unseen size takes longer than smaller ones, but at most in proportion to its size."""
        if (recent := self._recent.get(size)) is not None:
            return min(recent)
        at = bisect_left(self._sizes, size)
        below_s = min(self._recent[self._sizes[at - 1]]) if at else 0.0
        if at == len(self._sizes):
            return below_s
        above_s = min(self._recent[self._sizes[at]])
        return min(above_s, max(below_s, above_s * size / self._sizes[at]))


def _size(num_tokens: int) -> int:
    return num_tokens if num_tokens <= 2 * _BUCKET_TOKENS else num_tokens // _BUCKET_TOKENS * _BUCKET_TOKENS
