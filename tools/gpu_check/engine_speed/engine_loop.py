"""The engine without its link: the real scheduler, batch builder and executor; tokens are only counted."""

from __future__ import annotations

import gc
import select
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.backend.engine.batch_builder import BatchBuilder
from penstock.backend.engine.executor import SWITCH_INTERVAL_S, Executor
from penstock.backend.engine.step_timing import StepTiming
from penstock.backend.forward_pass import NOT_FINITE, SamplingParams
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.scheduling.scheduler import Scheduler
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.subscribers import Subscriber
from penstock.process.garbage_collection import resume_collection

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from penstock.backend.engine.launched_step import StepResult
    from penstock.backend.forward_pass import IBatchedForwardPass

_GREEDY = SamplingParams(temperature=0.0)
_WAIT_S = 5.0
"""Timeout for the next result; a step takes far less."""


@dataclass(eq=False)
class TokenStream:
    """One request and the times of its tokens, in seconds of the monotonic clock."""

    num_new_tokens: int
    submitted_s: float
    token_times_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.submitted_s


@dataclass(frozen=True)
class LoopSizes:
    num_pages: int
    page_tokens: int
    max_running: int
    max_batch_tokens: int
    max_context_tokens: int


class EngineLoop:
    """Used by one thread. The pass belongs to the executor's thread."""

    def __init__(self, make_pass: Callable[[], IBatchedForwardPass], sizes: LoopSizes) -> None:
        """make_pass runs on the executor's thread, and also creates the cache."""
        self._scheduler = Scheduler(
            PagePool(sizes.num_pages), sizes.page_tokens, sizes.max_running, sizes.max_batch_tokens
        )
        self._builder = BatchBuilder(sizes.max_running, -(-sizes.max_context_tokens // sizes.page_tokens))
        self._executor = Executor(1)
        self._executor.start(make_pass)
        # As a backend does before it serves. Without it, a collection of torch's objects stops steps for 0.1 s.
        resume_collection()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._step_timing = StepTiming()
        self._streams: dict[Sequence, TokenStream] = {}
        self.on_end: Callable[[TokenStream], None] = lambda _stream: None
        """Called with each stream that ends, between steps. It may submit more requests."""
        self.turn_s: list[float] = []
        """Host seconds of applying, planning, building and launching: one entry per turn that planned a step, including
        the turns without a plan before it."""
        self._unplanned_s = 0.0
        self.num_steps = 0

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def submit(self, prompt: NDArray[np.int32], num_new_tokens: int) -> TokenStream:
        now_s = time.monotonic()
        total = len(prompt) + num_new_tokens
        subscriber = Subscriber(0, len(self._streams), total, frozenset(), len(prompt), now_s, is_started=True)
        sequence = Sequence(subscriber, prompt.tobytes(), len(prompt), _GREEDY)
        stream = self._streams[sequence] = TokenStream(num_new_tokens, now_s)
        self._scheduler.add(sequence)
        return stream

    def run(self, until: Callable[[], bool]) -> None:
        """Run until `until()` is true or no request is open.

        Raises the error of a failed step, and TimeoutError if a step does not end in time.
        """
        while self._streams and not until():
            plan_due_s = self._turn()
            wait_s = _WAIT_S if plan_due_s is None else plan_due_s
            has_result = not self._executor.is_busy or select.select([self._executor.wake_fd], [], [], wait_s)[0]
            if not has_result and plan_due_s is None:
                raise TimeoutError(f"no step ended within {_WAIT_S:g} s")

    def close(self) -> None:
        """Stop the executor and its pass. Open requests are dropped."""
        for sequence in list(self._streams):
            self._scheduler.remove(sequence)
        self._streams.clear()
        self._executor.close()
        gc.unfreeze()  # the next model needs the memory of this one, which may be in cycles of references

    def _turn(self) -> float | None:
        """Apply results and plan steps. Returns seconds until the next plan is due, or None: after the next result."""
        started_s = time.perf_counter()
        self._executor.clear_wake()
        ended: list[TokenStream] = []
        for result in self._executor.results():
            self._apply(result, ended)
        num_planned, plan_due_s = self._plan_steps()
        self._unplanned_s += time.perf_counter() - started_s
        if num_planned:
            self.turn_s.append(self._unplanned_s)
            self._unplanned_s = 0.0
        for stream in ended:
            self.on_end(stream)
        return plan_due_s

    def _plan_steps(self) -> tuple[int, float | None]:
        """Plan as late as the device allows, like the engine. Returns the number of steps, and what `_turn` returns."""
        num_planned = 0
        while self._executor.has_capacity:
            if (spare_s := self._step_timing.spare_s(self._executor.running_s())) > 0:
                return num_planned, spare_s
            started_ns = time.thread_time_ns()
            if not (plan := self._scheduler.plan()):
                break
            self._executor.launch(plan, self._builder.build(plan), self._scheduler.take_saves())
            self._step_timing.note_plan(sum(plan.lengths), (time.thread_time_ns() - started_ns) / 1e9)
            num_planned += 1
        return num_planned, None

    def _apply(self, result: StepResult, ended: list[TokenStream]) -> None:
        """Apply a step's tokens as the engine does: most rows take the fast path."""
        if result.error is not None:
            raise result.error
        plan, now_s = result.plan, time.monotonic()
        self._step_timing.note_result(sum(plan.lengths), result.step_s, result.launch_s)
        self.num_steps += 1
        tokens = dict(zip(plan.logit_rows, result.token_ids, strict=True))
        rows = zip(plan.sequences, plan.generations, plan.ends, strict=True)
        for index, (sequence, generation, end) in enumerate(rows):
            if sequence.generation != generation:
                continue
            token = tokens.get(index)
            if token == NOT_FINITE:
                raise ArithmeticError("a row's logits are not finite")
            if end >= sequence.fast_path_until:
                self._scheduler.note_computed(sequence, end)
            if token is None:
                continue
            sequence.tokens.append(token)
            stream = self._streams[sequence]
            stream.token_times_s.append(now_s)
            if len(sequence.tokens) >= sequence.max_total_tokens:
                self._scheduler.remove(sequence)
                del self._streams[sequence]
                ended.append(stream)
            elif end >= sequence.fast_path_until:
                sequence.settle()
