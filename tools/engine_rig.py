"""The engine without processes: its real loop, scheduler and messages, between stand-ins for its link and its device.

`EngineRig` builds it. The link drops what is sent; the device's steps run by a simulated clock or as a subclass says.
`penstock replay`, benchmarks, the GPU check and tests use it.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from penstock.backend.engine.interfaces import IEngineLink, IExecutor, ISequenceScheduler
from penstock.backend.engine.loop import Engine
from penstock.backend.engine.pictures.desk import PictureDesk
from penstock.backend.engine.recorder import Recorder
from penstock.backend.engine.requests.delivery import Delivery
from penstock.backend.engine.requests.handling import RequestHandling
from penstock.backend.engine.requests.limits import EngineLimits
from penstock.backend.engine.requests.vector_delivery import VectorCache
from penstock.backend.engine.steps.batch_builder import BatchBuilder, WholeBatchBuilder
from penstock.backend.engine.steps.launched_step import LaunchedStep, PageSaves, StepResult
from penstock.backend.engine.steps.step_timing import StepTiming
from penstock.backend.forward_pass import StepBatch
from penstock.backend.kv_cache.kv_groups import KvGroups
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.kv_cache.page_store import StatePlaces
from penstock.backend.kv_cache.state_checkpoints import SPACING_TOKENS, StateCheckpoints
from penstock.backend.scheduling.drafting import Drafting
from penstock.backend.scheduling.scheduler import Scheduler
from penstock.backend.scheduling.step_plan import Plan
from penstock.backend.scheduling.whole_scheduler import WholeScheduler
from penstock.backend.structured_output.grammar_queue import GrammarQueue
from penstock.shm.link.events import LinkEvent
from penstock.shm.memory.board import BackendBoard
from penstock.shm.messages import (
    NO_TOKEN,
    Adapter,
    EventLogprobs,
    Failure,
    Finish,
    Progress,
    Quote,
    Started,
    StreamRecord,
    VectorPart,
)

_STATE_BYTES = 8
Launch = Callable[[Plan, StepBatch, PageSaves], LaunchedStep]
"""Like `launch_step` with a pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RigSizes:
    """Sizes of the cache and of steps. num_pages of 0: sequences are computed whole."""

    num_pages: int
    page_size_tokens: int
    max_running: int
    max_batch_tokens: int
    num_plans_ahead: int = 1
    max_park_steps: int = 64
    num_checkpoints: int | None = None
    """None if the pass keeps no state."""
    checkpoint_spacing: int = SPACING_TOKENS
    state_store: StatePlaces | None = None
    kv_windows: tuple[int | None, ...] = (None,)
    drafting: Drafting | None = None
    has_picture_axes: bool = False

    @property
    def groups(self) -> KvGroups:
        return KvGroups.of(
            self.page_size_tokens,
            self.kv_windows,
            self.max_batch_tokens,
            self.num_plans_ahead,
            keeps_state=self.num_checkpoints is not None,
        )

    def make_scheduler(self, pool: PagePool) -> ISequenceScheduler:
        if not self.num_pages:
            return WholeScheduler(self.max_running, self.max_batch_tokens)
        return Scheduler(
            pool,
            self.page_size_tokens,
            self.max_running,
            self.max_batch_tokens,
            self.max_park_steps,
            self.num_plans_ahead,
            states=None
            if self.num_checkpoints is None
            else StateCheckpoints(
                PagePool(self.num_checkpoints, store=self.state_store),
                self.page_size_tokens,
                self.checkpoint_spacing,
                _STATE_BYTES,
            ),
            kv_windows=self.kv_windows,
            drafting=self.drafting,
        )

    def make_builder(self, max_context_tokens: int, *, has_adapters: bool) -> BatchBuilder | WholeBatchBuilder:
        if not self.num_pages:
            return WholeBatchBuilder()
        groups = self.groups
        num_pages = groups.pages_for(max_context_tokens)
        return BatchBuilder(
            self.max_running,
            num_pages,
            groups.count,
            has_adapters=has_adapters,
            has_picture_axes=self.has_picture_axes,
        )


class EngineRig:
    """One engine. Its owner turns it, and closes the board."""

    def __init__(
        self,
        link: IEngineLink,
        executor: IExecutor,
        sizes: RigSizes,
        limits: EngineLimits,
        clock: Callable[[], float] = time.monotonic,
        *,
        pool: PagePool | None = None,
        board: BackendBoard | None = None,
        step_timing: StepTiming | None = None,
        grammar_queue: GrammarQueue | None = None,
        vector_cache: VectorCache | None = None,
        recorder: Recorder | None = None,
        make_pictures: Callable[[ISequenceScheduler, Delivery], PictureDesk | None] = lambda _, __: None,
    ) -> None:
        self.board = board or BackendBoard.create()
        self.scheduler: ISequenceScheduler = sizes.make_scheduler(pool or PagePool(sizes.num_pages))
        builder = sizes.make_builder(limits.max_context_tokens, has_adapters=bool(limits.adapters))
        self.requests = RequestHandling.make(
            link,
            self.scheduler,
            self.board,
            limits,
            clock,
            grammar_queue=grammar_queue,
            vector_cache=vector_cache,
            recorder=recorder,
            make_pictures=partial(make_pictures, self.scheduler),
        )
        self.engine = Engine(
            link, executor, self.scheduler, builder, self.requests, self.board, clock, step_timing=step_timing
        )


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

    def call(self, work: Callable[[], None]) -> None:
        """Do this at once: it comes after the steps before it only if none is in flight."""
        if self.is_busy:
            raise RuntimeError("work for an executor with steps in flight; these stand-ins do not order it")
        work()

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


class DroppingLink(IEngineLink):
    """Drops all messages. Subclasses look at what they need: every token and every end passes through `push`."""

    def __init__(self) -> None:
        self.arrivals: list[LinkEvent] = []
        """What the next `receive` returns."""

    def wait(self, timeout_s: float | None, wake_fd: int) -> None:
        """Wait for the executor alone: nothing arrives meanwhile."""
        if not self.arrivals:
            select.select([wake_fd], [], [], timeout_s)

    def receive(self) -> Iterable[LinkEvent]:
        arrived, self.arrivals = self.arrivals, []
        return arrived

    def push(
        self,
        frontend: int,
        request_id: int,
        token_id: int,
        finish: Finish = Finish.NONE,
        started: Started | None = None,
        failure: Failure | None = None,
        logprobs: EventLogprobs | None = None,
        progress: Progress | None = None,
    ) -> None:
        pass

    def push_answer(self, frontend: int, answer: Quote | StreamRecord) -> None:
        pass

    def push_prompt_logprobs(self, frontend: int, request_id: int, entry: EventLogprobs) -> None:
        pass

    def push_vectors(
        self,
        frontend: int,
        request_id: int,
        parts: Iterable[VectorPart],  # noqa: ARG002 - dropped, as by every stub here
        started: Started | None = None,
    ) -> None:
        self.push(frontend, request_id, NO_TOKEN, Finish.STOP, started)

    def push_tokens(self, frontend: int, request_ids: list[int], token_ids: list[int]) -> None:
        for request_id, token_id in zip(request_ids, token_ids, strict=True):
            self.push(frontend, request_id, token_id)

    def note_preemption(self, frontend: int, request_id: int) -> None:
        pass

    def announce_room(self, frontend: int) -> None:
        pass

    def announce_adapters(self, adapters: tuple[Adapter, ...]) -> None:
        pass

    def flush(self) -> None:
        pass
