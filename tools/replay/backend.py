"""The backend's real loop, scheduler and recorder, turned by a simulated clock that tells the recording's times.

A turn takes the time that turns took in the recording. Grammars are compiled before a turn goes on.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.backend.engine.recorder import Recorder
from penstock.backend.engine.requests.limits import EngineLimits
from penstock.backend.engine.steps.launched_step import LaunchedStep, PageSaves
from penstock.backend.engine.steps.step_timing import StepTiming
from penstock.backend.forward_pass import StepBatch, StepOutput
from penstock.backend.scheduling.step_plan import Plan
from penstock.backend.structured_output.grammar_cache import GrammarCache
from penstock.backend.structured_output.grammar_queue import GrammarQueue
from penstock.shm.memory.ring import Stretch
from penstock.shm.recording.events import BackendStarted, pack_event
from penstock.tools.engine_rig import ClockedExecutor, DroppingLink, EngineRig, Launch
from penstock.tools.replay.arrivals import Arrivals
from penstock.tools.replay.sizes import rig_sizes
from penstock.tools.replay.step_times import StepTimes

_PLAN_S = 0.0005
"""CPU time of planning for the loop's timing. A measured one would make every replay different."""
_MIN_TURN_S = 1e-6
_PATIENCE_S = 3600.0
"""A replay ends this long after its last event, even if requests are still open."""
_GRAMMAR_WAIT_S = 60.0
VECTOR_WIDTHS = {"embed": 1}
"""`PassSpec.pooled` of the pass that samples made-up tokens."""


class _EvenTiming(StepTiming):
    def note_plan(self, num_tokens: int, plan_s: float) -> None:  # noqa: ARG002 - a measured time
        super().note_plan(num_tokens, _PLAN_S)

    def note_result(self, num_tokens: int, step_s: float, launch_s: float) -> None:  # noqa: ARG002 - as above
        super().note_result(num_tokens, step_s, 0.0)


@dataclass(frozen=True, slots=True)
class ReplayedPass:
    """The functions that compute the steps, and the engine's facts about the pass."""

    launch: Launch
    pooled: Mapping[str, int]
    compiler: GrammarCache | None = None
    scores_prompts: bool = True


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


class ReplayedBackend:
    """Runs once."""

    def __init__(
        self,
        started: BackendStarted,
        arrivals: Arrivals,
        step_times: StepTimes,
        forward_pass: ReplayedPass,
        *,
        with_tokens: bool,
    ) -> None:
        """with_tokens records the sampled tokens."""
        self._arrivals = arrivals
        self._events = deque(arrivals.events)
        self._last_event_s = arrivals.events[-1][0]
        self._now_s = arrivals.events[0][0]
        self._turn_s = max(_MIN_TURN_S, step_times.turn_s)
        self._device = ClockedExecutor(started.num_plans_ahead, forward_pass.launch, step_times.of)
        self._link, self._records = DroppingLink(), [pack_event(started, self._now_s)]
        self._compiled = threading.Event()
        self._grammar_queue = GrammarQueue(forward_pass.compiler, self._compiled.set, started.max_waiting)
        limits = EngineLimits(
            started.vocab_size,
            started.max_context,
            started.max_waiting,
            started.priority_step_s,
            scores_prompts=forward_pass.scores_prompts,
            pooled=forward_pass.pooled,
            adapters={adapter_id: index for index, adapter_id in enumerate(started.adapters)},
        )
        self._rig = EngineRig(
            self._link,
            self._device,
            rig_sizes(started),
            limits,
            self._clock,
            step_timing=_EvenTiming(),
            grammar_queue=self._grammar_queue,
            recorder=Recorder(self._records.append, with_tokens=with_tokens, clock=self._clock),
        )

    def _clock(self) -> float:
        return self._now_s

    def run(self) -> Stretch:
        """Return the records of the replay."""
        try:
            while (due_s := self._next_due_s()) is not None:
                self._now_s = max(self._now_s, due_s)
                self._turn()
        finally:
            self._rig.board.close()
        records = self._records
        return Stretch(0, sum(map(len, records)), records)

    def _next_due_s(self) -> float | None:
        due_s = [self._events[0][0]] if self._events else []
        if (device_s := self._device.next_due_s()) is not None:
            due_s.append(device_s)
        is_open = self._rig.requests.table.num_open and self._now_s < self._last_event_s + _PATIENCE_S
        if self._device.is_busy or is_open:
            due_s.append(self._now_s + self._rig.engine.next_turn_s())
        return min(due_s, default=None)

    def _turn(self) -> None:
        self._device.advance(self._now_s)
        while self._events and self._events[0][0] <= self._now_s:
            self._link.arrivals.append(self._arrivals.complete(self._events.popleft()[1]))
        self._rig.engine.turn()
        while self._grammar_queue.num_waiting and self._compiled.wait(_GRAMMAR_WAIT_S):
            self._compiled.clear()
            self._rig.engine.turn()
        self._device.advance(self._now_s + self._turn_s)
        self._now_s += self._turn_s
        self._device.take_plans()
