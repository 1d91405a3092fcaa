"""Executors without threads: a subclass says when a step runs."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.backend.engine.interfaces import IExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.engine.steps.launched_step import LaunchedStep, PageSaves, StepResult
    from penstock.backend.forward_pass import StepBatch
    from penstock.backend.scheduling.step_plan import Plan

    Launch = Callable[[Plan, StepBatch, PageSaves], LaunchedStep]
    """Like `launch_step` with a pass."""


class ThreadlessExecutor(IExecutor):
    """Keeps plans and results in order, like `Executor`. Subclasses say when a step runs."""

    wake_fd = -1

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._plans: deque[tuple[Plan, StepBatch, PageSaves]] = deque()
        """Plans whose step has not begun."""
        self._results: list[StepResult] = []
        self._num_in_flight = 0

    @property
    def has_capacity(self) -> bool:
        return self._num_in_flight <= self._capacity

    @property
    def is_busy(self) -> bool:
        return self._num_in_flight > 0

    def clear_wake(self) -> None:
        """Nothing wakes: whoever runs the steps turns the loop."""

    def wake(self) -> None:
        """See `clear_wake`."""

    def launch(self, plan: Plan, batch: StepBatch, saves: PageSaves) -> None:
        self._num_in_flight += 1
        self._plans.append((plan, batch, saves))

    def results(self) -> list[StepResult]:
        results, self._results = self._results, []
        self._num_in_flight -= len(results)
        return results


class ClockedExecutor(ThreadlessExecutor):
    """Steps begin and end by a simulated clock, which the caller moves. Each binds its rows when it begins.

    One turn of the loop is `advance` to its time, the engine's turn, and `take_plans` when it ends.
    """

    def __init__(self, capacity: int, launch: Launch, duration_s: Callable[[int], float]) -> None:
        """duration_s(number of tokens) is the time that a step takes, whatever launch takes."""
        super().__init__(capacity)
        self._launch = launch
        self._duration_s = duration_s
        self._unready: list[tuple[Plan, StepBatch, PageSaves]] = []
        """Plans of the current turn."""
        self._running: LaunchedStep | None = None
        self._began_s = self._ends_s = self._now_s = 0.0

    def running_s(self) -> float:
        return 0.0 if self._running is None else self._now_s - self._began_s

    def launch(self, plan: Plan, batch: StepBatch, saves: PageSaves) -> None:
        self._num_in_flight += 1
        self._unready.append((plan, batch, saves))

    def next_due_s(self) -> float | None:
        """Time at which the loop must turn because of the device; None if nothing runs."""
        if self._results:
            return self._now_s
        return None if self._running is None else self._ends_s

    def advance(self, until_s: float) -> None:
        """End the steps that end by then; the plans behind them begin."""
        while self._running is not None and self._ends_s <= until_s:
            self._end(self._running)
            self._begin(self._ends_s)
        self._now_s = until_s

    def take_plans(self) -> None:
        """Accept the plans that the turn has launched; the turn ends now."""
        self._plans += self._unready
        self._unready.clear()
        if self._running is None:
            self._begin(self._now_s)

    def _begin(self, at_s: float) -> None:
        self._running = None
        self._began_s = self._ends_s = at_s
        while self._running is None and self._plans:
            launched = self._launch(*self._plans.popleft())
            if launched.plan:
                self._running = launched
                self._ends_s = at_s + self._duration_s(sum(launched.plan.lengths))
            else:
                self._end(launched)

    def _end(self, step: LaunchedStep) -> None:
        duration_s = self._ends_s - self._began_s
        self._results.append(replace(step.finish(), step_s=duration_s, ended_s=self._ends_s))
