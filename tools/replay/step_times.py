"""Durations of a replay's steps: the recorded durations of steps with the same number of tokens."""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import fmean

import numpy as np

from penstock.commands.recorder.history import Life
from penstock.shm.recording.file import RecordingError

_MAX_STEP_S = 300.0
"""The loop gives up a longer step."""
_MAX_TURN_S = 0.01


class StepTimes:
    """The mean for each number of tokens; between two numbers on the line that joins them.

    A step lasts from the time at which it could begin, planned and with the step before it at its end, so it includes
    what a busy machine takes to launch it.
    """

    def __init__(self, life: Life) -> None:
        """Raises RecordingError if no step has a duration."""
        durations_s: defaultdict[int, list[float]] = defaultdict(list)
        turns_s = []
        free_s = 0.0
        """When the device had nothing more to do."""
        for number in sorted(life.steps):
            step = life.steps[number]
            if step.ended_s is None:
                continue
            began_s, free_s = max(step.planned_s, free_s), step.ended_s
            if step.step_s > 0 and not step.dropped_slots and 0.0 < step.ended_s - began_s <= _MAX_STEP_S:
                durations_s[step.plan.num_tokens].append(step.ended_s - began_s)
            turn_s = step.planned_s - step.plan.turn_began_s
            if math.isfinite(turn_s):
                turns_s.append(min(max(turn_s, 0.0), _MAX_TURN_S))
        if not durations_s:
            raise RecordingError("no step has ended while it was recorded")
        self._sizes = np.array(sorted(durations_s))
        self._durations_s = np.array([fmean(durations_s[size]) for size in self._sizes.tolist()])
        self.turn_s = fmean(turns_s) if turns_s else 0.0
        """From the beginning of a turn of the loop to the launch of its plan."""

    def of(self, num_tokens: int) -> float:
        """Duration in seconds of a step of num_tokens."""
        return float(np.interp(num_tokens, self._sizes, self._durations_s))
