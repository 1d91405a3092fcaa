"""Builds the engine around a link and an executor."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.backend.engine.loop import Engine
from penstock.backend.engine.requests.handling import RequestHandling
from penstock.backend.engine.steps.batch_builder import BatchBuilder, WholeBatchBuilder
from penstock.backend.kv_cache.kv_groups import KvGroups
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.scheduling.scheduler import Scheduler
from penstock.backend.scheduling.whole_scheduler import WholeScheduler
from penstock.shm.memory.board import BackendBoard

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.engine.interfaces import IEngineLink, IExecutor, ISequenceScheduler
    from penstock.backend.engine.recorder import Recorder
    from penstock.backend.engine.requests.limits import EngineLimits
    from penstock.backend.engine.requests.vector_delivery import VectorCache
    from penstock.backend.engine.steps.step_timing import StepTiming
    from penstock.backend.structured_output.grammar_queue import GrammarQueue


@dataclass(frozen=True, kw_only=True, slots=True)
class RigSizes:
    """Sizes of the cache and of steps. num_pages of 0: sequences are computed whole."""

    num_pages: int
    page_size_tokens: int
    max_running: int
    max_batch_tokens: int
    num_plans_ahead: int = 1
    max_park_steps: int = 64
    keeps_state: bool = False
    kv_windows: tuple[int | None, ...] = (None,)

    @property
    def groups(self) -> KvGroups:
        return KvGroups.of(
            self.page_size_tokens,
            self.kv_windows,
            self.max_batch_tokens,
            self.num_plans_ahead,
            keeps_state=self.keeps_state,
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
            keeps_state=self.keeps_state,
            kv_windows=self.kv_windows,
        )

    def make_builder(self, max_context_tokens: int, *, has_adapters: bool) -> BatchBuilder | WholeBatchBuilder:
        if not self.num_pages:
            return WholeBatchBuilder()
        groups = self.groups
        num_pages = groups.pages_for(max_context_tokens)
        return BatchBuilder(self.max_running, num_pages, groups.count, has_adapters=has_adapters)


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
        )
        self.engine = Engine(
            link, executor, self.scheduler, builder, self.requests, self.board, clock, step_timing=step_timing
        )
