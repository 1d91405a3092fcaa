"""The backend's real loop, scheduler and recorder, turned by a simulated clock that tells the recording's times.

A turn takes the time that turns took in the recording. Grammars are compiled before a turn goes on.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from penstock.backend.engine.batch_builder import BatchBuilder, WholeBatchBuilder
from penstock.backend.engine.limits import EngineLimits
from penstock.backend.engine.loop import Engine
from penstock.backend.engine.recording.recorder import Recorder
from penstock.backend.engine.requests import Requests
from penstock.backend.engine.step_timing import StepTiming
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.scheduling.scheduler import Scheduler
from penstock.backend.scheduling.whole_scheduler import WholeScheduler
from penstock.backend.structured_output.grammar_queue import GrammarQueue
from penstock.shm.memory.board import BackendBoard
from penstock.shm.memory.ring import Stretch
from penstock.shm.recording.events import pack_event
from penstock.tools.replay.device import VECTOR_WIDTHS, ReplayedDevice, ReplayedLink
from penstock.tools.replay.sizes import pages_per_sequence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.backend.scheduling.interface import ISequenceScheduler
    from penstock.backend.structured_output.grammar_cache import GrammarCache
    from penstock.shm.recording.events import BackendStarted
    from penstock.tools.replay.arrivals import Arrivals
    from penstock.tools.replay.device import Launch
    from penstock.tools.replay.step_times import StepTimes

_PLAN_S = 0.0005
"""CPU time of planning for the loop's timing. A measured one would make every replay different."""
_MIN_TURN_S = 1e-6
_PATIENCE_S = 3600.0
"""A replay ends this long after its last event, even if requests are still open."""
_GRAMMAR_WAIT_S = 60.0


class _EvenTiming(StepTiming):
    def note_plan(self, num_tokens: int, plan_s: float) -> None:  # noqa: ARG002 - a measured time
        super().note_plan(num_tokens, _PLAN_S)

    def note_result(self, num_tokens: int, step_s: float, launch_s: float) -> None:  # noqa: ARG002 - as above
        super().note_result(num_tokens, step_s, 0.0)


class _RecordList:
    """Replaces RingWriter, and keeps all records."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.append = self.records.append


@dataclass(frozen=True, slots=True)
class ReplayedPass:
    """The functions that compute the steps, and the engine's facts about the pass."""

    launch: Launch
    pooled: Mapping[str, int]
    compiler: GrammarCache | None = None
    scores_prompts: bool = True


def made_up_pass(launch: Launch) -> ReplayedPass:
    """For `MadeUpSteps.launch`."""
    return ReplayedPass(launch, VECTOR_WIDTHS)


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
        self._device = ReplayedDevice(started.num_plans_ahead, forward_pass.launch, step_times)
        self._link, self._board, self._records = ReplayedLink(), BackendBoard.create(), _RecordList()
        self._compiled = threading.Event()
        self._grammar_queue = GrammarQueue(forward_pass.compiler, self._compiled.set, started.max_waiting)
        scheduler, builder = _make_scheduler(started)
        limits = EngineLimits(
            started.vocab_size,
            started.max_context,
            started.max_waiting,
            started.priority_step_s,
            scores_prompts=forward_pass.scores_prompts,
            pooled=forward_pass.pooled,
            adapters={adapter_id: index for index, adapter_id in enumerate(started.adapters)},
        )
        recorder = Recorder(cast("Any", self._records), with_tokens=with_tokens, clock=self._clock)
        self._records.append(pack_event(started, self._now_s))
        link, device = cast("Any", self._link), cast("Any", self._device)
        self._requests = Requests.make(
            link, scheduler, self._board, limits, self._clock, grammar_queue=self._grammar_queue, recorder=recorder
        )
        self._engine = Engine(
            link, device, scheduler, builder, self._requests, self._board, self._clock, step_timing=_EvenTiming()
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
            self._board.close()
        records = self._records.records
        return Stretch(0, sum(map(len, records)), records)

    def _next_due_s(self) -> float | None:
        due_s = [self._events[0][0]] if self._events else []
        if (device_s := self._device.next_due_s()) is not None:
            due_s.append(device_s)
        is_open = self._requests.table.num_open and self._now_s < self._last_event_s + _PATIENCE_S
        if self._device.is_busy or is_open:
            due_s.append(self._now_s + self._engine.next_turn_s())
        return min(due_s, default=None)

    def _turn(self) -> None:
        self._device.advance(self._now_s)
        while self._events and self._events[0][0] <= self._now_s:
            self._link.arrivals.append(self._arrivals.complete(self._events.popleft()[1]))
        self._engine.turn()
        while self._grammar_queue.num_waiting and self._compiled.wait(_GRAMMAR_WAIT_S):
            self._compiled.clear()
            self._engine.turn()
        self._device.advance(self._now_s + self._turn_s)
        self._now_s += self._turn_s
        self._device.take_plans()


def _make_scheduler(started: BackendStarted) -> tuple[ISequenceScheduler, BatchBuilder | WholeBatchBuilder]:
    if not started.num_pages:
        return WholeScheduler(started.max_running, started.max_batch_tokens), WholeBatchBuilder()
    scheduler = Scheduler(
        PagePool(started.num_pages),
        started.page_size,
        started.max_running,
        started.max_batch_tokens,
        num_plans_ahead=started.num_plans_ahead,
        keeps_state=started.keeps_state,
        kv_windows=started.kv_windows,
    )
    num_groups, has_adapters = len(started.kv_windows), bool(started.adapters)
    builder = BatchBuilder(started.max_running, pages_per_sequence(started), num_groups, has_adapters=has_adapters)
    return scheduler, builder
