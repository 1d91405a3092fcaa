"""The device and the link of a simulated backend."""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any

from penstock.backend.engine.launched_step import StepResult
from penstock.shm.messages import Finish
from penstock.tools.bench.components.bare_loop import UnsentLink

if TYPE_CHECKING:
    from penstock.backend.forward_pass import StepBatch
    from penstock.backend.scheduling.step_plan import Plan

STEP_S = 0.005
"""About the time of a decode step on a large GPU, for a model of 8 billion parameters."""
VOCAB_SIZE = 32_000


class SimulatedDevice:
    """Replaces Executor. Steps begin and end by the simulated clock; each binds its rows when it begins."""

    def __init__(self, capacity: int, token_s: float = 0.0) -> None:
        """A step lasts STEP_S, and token_s longer for each of its tokens."""
        self._capacity = capacity
        self._token_s = token_s
        self._plans: deque[Plan] = deque()
        self._unready: list[Plan] = []
        """Plans launched in the current turn."""
        self._running: Plan | None = None
        self._results: list[StepResult] = []
        self._num_in_flight = 0
        self._token_ids = itertools.cycle(range(1, VOCAB_SIZE))
        self._step_s = STEP_S
        """Duration of the running step."""
        self._ends_s = 0.0
        """End of the running step, or of the last one if the device is idle."""
        self.now_s = 0.0
        """Start of the current turn."""
        self.idle_s = 0.0
        """Idle time between the first step and the last."""
        self.busy_s = 0.0
        self.num_steps = 0
        self.saved_tokens = 0

    @property
    def has_capacity(self) -> bool:
        return self._num_in_flight <= self._capacity

    @property
    def is_busy(self) -> bool:
        return self._num_in_flight > 0

    def running_s(self) -> float:
        """Time that the running step has run at `now_s`."""
        return 0.0 if self._running is None else self._step_s - (self._ends_s - self.now_s)

    def clear_wake(self) -> None:
        pass

    def launch(self, plan: Plan, _batch: StepBatch, _saves: object) -> None:
        self._num_in_flight += 1
        self._unready.append(plan)

    def results(self) -> list[StepResult]:
        results, self._results = self._results, []
        self._num_in_flight -= len(results)
        return results

    def next_due_s(self, now_s: float) -> float | None:
        """Return when the loop has to run next; None if nothing runs."""
        if self._results:
            return now_s
        return None if self._running is None else self._ends_s

    def advance(self, until_s: float) -> None:
        """End the steps that end by then, and begin the planned ones behind them."""
        self.now_s = until_s
        while self._running is not None and self._ends_s <= until_s:
            plan, self._running = self._running, None
            self.num_steps += 1
            self._results.append(StepResult(plan, [next(self._token_ids) for _ in plan.logit_rows], self._step_s))
            self._begin(self._ends_s)

    def take_plans(self, now_s: float) -> None:
        """Accept the plans that the turn has launched; the turn ends now."""
        self._plans += self._unready
        self._unready.clear()
        self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        while self._running is None and self._plans:
            planned = self._plans.popleft()
            plan = planned.keep(planned.live_rows())
            self.saved_tokens += sum(planned.lengths) - sum(plan.lengths)
            if not plan:
                self._results.append(StepResult(plan, [], 0.0))
                continue
            self.idle_s += now_s - self._ends_s if self.num_steps else 0.0
            self._step_s = STEP_S + self._token_s * sum(plan.lengths)
            self.busy_s += self._step_s
            self._running, self._ends_s = plan, now_s + self._step_s


class RecordingLink(UnsentLink):
    """Records the pushed messages."""

    def __init__(self) -> None:
        super().__init__()
        self.pushed: list[tuple[int, bool, bool]] = []
        """(request id, whether there is a token, whether the request ends)."""

    def push(
        self, frontend: int, request_id: int, token_id: int, finish: Finish = Finish.NONE, *rest: Any, **named: Any
    ) -> None:
        super().push(frontend, request_id, token_id, finish, *rest, **named)
        self.pushed.append((request_id, token_id >= 0, finish is not Finish.NONE))

    def note_preemption(self, frontend: int, request_id: int) -> None:
        pass

    def push_tokens(self, frontend: int, request_ids: list[int], token_ids: list[int]) -> None:
        super().push_tokens(frontend, request_ids, token_ids)
        self.pushed += [(request_id, True, False) for request_id in request_ids]
