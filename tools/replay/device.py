"""The executor and the link of a replay, in simulated time."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backend.engine.launched_step import LaunchedStep, launch_step
from penstock.backend.forward_pass import StepOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from penstock.backend.engine.launched_step import PageSaves, StepResult
    from penstock.backend.forward_pass import IBatchedForwardPass, StepBatch
    from penstock.backend.scheduling.step_plan import Plan
    from penstock.shm.link.events import LinkEvent
    from penstock.tools.replay.arrivals import Arrivals
    from penstock.tools.replay.step_times import StepTimes

    Launch = Callable[[Plan, StepBatch, PageSaves], LaunchedStep]

VECTOR_WIDTHS = {"embed": 1}
"""`PassSpec.pooled` of the pass that samples made-up tokens."""


class MadeUpSteps:
    """Computes nothing: a sequence samples its made-up tokens, and stops where it stopped in the recording."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals

    def launch(self, plan: Plan, _batch: StepBatch, _saves: PageSaves) -> LaunchedStep:
        """Like `launch_step`."""
        kept = plan.live_rows()
        if len(kept) < len(plan):
            plan = plan.keep(kept)
        if not plan.logit_rows and not plan.pooled_rows:
            return LaunchedStep(plan, None)
        token_ids = self._sample(plan) if plan.logit_rows else np.empty(0, np.int32)
        vectors = tuple(np.zeros(1, np.float32) for _ in plan.pooled_rows) or None
        return LaunchedStep(plan, StepOutput(token_ids, pooled=vectors), widths=VECTOR_WIDTHS)

    def _sample(self, plan: Plan) -> NDArray[np.int32]:
        numbers, positions = [], []
        for index in plan.logit_rows:
            subscriber = next(iter(plan.sequences[index].subscribers))
            numbers.append(self._arrivals.number_of[subscriber.frontend, subscriber.request_id])
            positions.append(plan.ends[index])
        token_ids = self._arrivals.made_up.sampled(numbers, positions)
        stop_ids = self._arrivals.stop_ids
        for place, name in enumerate(zip(numbers, positions, strict=True)):
            if name in stop_ids:
                token_ids[place] = stop_ids[name]
        return token_ids


class ComputedSteps:
    """Runs the steps through a forward pass."""

    def __init__(self, forward_pass: IBatchedForwardPass) -> None:
        self._pass = forward_pass

    def launch(self, plan: Plan, batch: StepBatch, saves: PageSaves) -> LaunchedStep:
        """Launch a step. Masks are made at once, so none is late."""
        return launch_step(self._pass, plan, batch, saves)


class ReplayedDevice:
    """Replaces Executor. A step ends after its recorded time, whatever launch takes."""

    wake_fd = -1

    def __init__(self, capacity: int, launch: Launch, step_times: StepTimes) -> None:
        self._capacity = capacity
        self._launch = launch
        self._step_times = step_times
        self._unready: list[tuple[Plan, StepBatch, PageSaves]] = []
        """Plans of the current turn."""
        self._plans: deque[tuple[Plan, StepBatch, PageSaves]] = deque()
        self._running: LaunchedStep | None = None
        self._began_s = self._ends_s = self._now_s = 0.0
        self._results: list[StepResult] = []
        self._num_in_flight = 0

    @property
    def has_capacity(self) -> bool:
        return self._num_in_flight <= self._capacity

    @property
    def is_busy(self) -> bool:
        return self._num_in_flight > 0

    def running_s(self) -> float:
        return 0.0 if self._running is None else self._now_s - self._began_s

    def clear_wake(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def launch(self, plan: Plan, batch: StepBatch, saves: PageSaves) -> None:
        self._num_in_flight += 1
        self._unready.append((plan, batch, saves))

    def results(self) -> list[StepResult]:
        results, self._results = self._results, []
        self._num_in_flight -= len(results)
        return results

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
                self._ends_s = at_s + self._step_times.of(sum(launched.plan.lengths))
            else:
                self._end(launched)

    def _end(self, step: LaunchedStep) -> None:
        duration_s = self._ends_s - self._began_s
        self._results.append(replace(step.finish(), step_s=duration_s, ended_s=self._ends_s))


class ReplayedLink:
    """Replaces BackendLink: the recorded requests arrive, and messages to them are dropped."""

    def __init__(self) -> None:
        self.arrivals: list[LinkEvent] = []

    def receive(self) -> list[LinkEvent]:
        arrived, self.arrivals = self.arrivals, []
        return arrived

    def push(self, frontend: int, request_id: int, token_id: int, *rest: Any, **named: Any) -> None:
        pass

    def push_prompt_logprobs(self, frontend: int, request_id: int, entry: object) -> None:
        pass

    def push_vectors(self, frontend: int, request_id: int, parts: Iterable[object], started: object = None) -> None:
        pass

    def push_tokens(self, frontend: int, request_ids: list[int], token_ids: list[int]) -> None:
        pass

    def announce_room(self, frontend: int) -> None:
        pass

    def note_preemption(self, frontend: int, request_id: int) -> None:
        pass

    def flush(self) -> None:
        pass
