"""Limits how long one sequence waits for a prefix that another one computes."""

from __future__ import annotations


class Parking:
    """The patience of one sequence: it waits as long as its prefix grows within a number of steps."""

    __slots__ = ("deadline_step", "num_available", "num_pages_passed")

    def __init__(self) -> None:
        self.num_available = -1
        """Tokens of the prefix that were computed at the last check."""
        self.deadline_step = 0
        """Step before which `num_available` must grow."""
        self.num_pages_passed = 0
        """Pages that later sequences have taken since this one was first found not to fit."""

    def may_wait(self, num_available: int, step: int, max_steps: int) -> bool:
        """Note that num_available tokens of the prefix are computed now. False if it has not grown for max_steps."""
        if num_available > self.num_available:
            self.num_available = num_available
            self.deadline_step = step + max_steps
        return step < self.deadline_step

    def restart(self) -> None:
        self.num_available = -1
        self.num_pages_passed = 0
