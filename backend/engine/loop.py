"""The loop: receive → apply → plan → launch → flush. All that it does is done by a collaborator."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from penstock.backend.engine.executor import ExecutorFailed
from penstock.backend.engine.step_timing import StepTiming
from penstock.backend.forward_pass import NOT_FINITE, DeviceLost
from penstock.backend.scheduling.step_plan import NO_SAMPLE
from penstock.shm.link.events import Cancellation, FrontendDeath, Submission
from penstock.shm.messages import EventLogprobs, FailureCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.engine.batch_builder import BatchBuilder
    from penstock.backend.engine.executor import Executor, StepResult
    from penstock.backend.engine.requests import Requests
    from penstock.backend.forward_pass import TokenLogprobs
    from penstock.backend.scheduling.scheduler import Scheduler
    from penstock.backend.scheduling.step_plan import Plan
    from penstock.shm.link.backend_link import BackendLink
    from penstock.shm.memory.board import BackendBoard

logger = logging.getLogger("penstock.backend")

_IDLE_TURN_S = 0.5
"""The loop turns at least this often, so that its heartbeat on the board stays fresh."""
_HUNG_STEP_S = 60.0
"""A step that runs longer is taken for hung: the heartbeat stops, and frontends turn not ready."""
_DEAD_STEP_S = 300.0
"""A step that runs longer will not end: the process does, to be restarted."""
_MAX_FAILED_STEPS = 16
"""So many failed steps in a row are not a request's fault."""


class Engine:
    """Turns the loop. Requests are `Requests`' affair, steps are the scheduler's and the executor's."""

    def __init__(
        self,
        link: BackendLink,
        executor: Executor,
        scheduler: Scheduler,
        builder: BatchBuilder,
        requests: Requests,
        board: BackendBoard,
        clock: Callable[[], float] = time.monotonic,
        *,
        step_timing: StepTiming | None = None,
    ) -> None:
        self._link = link
        self._executor = executor
        self._scheduler = scheduler
        self._builder = builder
        self._intake = requests.intake
        self._delivery = requests.delivery
        self._canceller = requests.canceller
        self._open_requests = requests.table
        self._board = board
        self._clock = clock
        self._drain_deadline_s: float | None = None
        self._num_failed_steps = 0
        """In a row."""
        self._step_timing = step_timing or StepTiming()
        self.plan_due_s: float | None = None
        """From the end of the last turn; None where nothing is to be planned before something happens."""

    def run(self) -> None:
        """Serves until `drain` was called and nothing runs, or its time is up. Raises ExecutorFailed."""
        while not self._is_drained():
            self.turn()
            self._link.wait(self.next_turn_s(), self._executor.wake_fd)

    def next_turn_s(self) -> float:
        """Seconds after which a turn is wanted even if nothing happens."""
        at_most_s = _IDLE_TURN_S if self.plan_due_s is None else min(_IDLE_TURN_S, self.plan_due_s)
        return self._canceller.next_due_s(at_most_s)

    def turn(self) -> None:
        """One turn of the loop. Cancellations take effect here, before the next plan; never blocks."""
        self._executor.clear_wake()
        for event in self._link.receive():
            match event:
                case Submission():
                    self._intake.submit(event)
                case Cancellation(frontend, request_id, noticed_ns):
                    self._canceller.cancel(frontend, request_id, noticed_ns)
                case FrontendDeath(frontend):
                    self._canceller.drop_frontend(frontend)
        self._intake.submit_compiled()
        self._canceller.expire()
        for result in self._executor.results():
            self._apply(result)
            if isinstance(result.error, DeviceLost):
                self._link.flush()  # who was in that step is told; the others' frontends send them again
                raise ExecutorFailed("the device is lost") from result.error
        self.plan_due_s = self._plan_steps()
        for sequence in self._scheduler.take_preempted():
            self._delivery.note_preemption(sequence)
        self._link.flush()
        self._show_on_board()

    def drain(self, timeout_s: float) -> None:
        """No new requests from now on; `run` returns when all ended, or after timeout_s. Safe in a signal handler."""
        self._intake.is_draining = True
        self._drain_deadline_s = self._clock() + timeout_s
        self._executor.wake()

    def _is_drained(self) -> bool:
        if self._drain_deadline_s is None:
            return False
        return self._clock() >= self._drain_deadline_s or not (self._open_requests.num_open or self._executor.is_busy)

    def _plan_steps(self) -> float | None:
        """As many as the device will want before long. Returns when the next one is to be planned."""
        while self._executor.has_capacity:
            if (spare_s := self._step_timing.spare_s(self._executor.running_s())) > 0:
                return spare_s
            started_ns = time.thread_time_ns()
            if not (plan := self._scheduler.plan()):
                return None
            self._launch(plan, started_ns)
        return None

    def _launch(self, plan: Plan, started_ns: int) -> None:
        """started_ns, of this thread's CPU time, is when the planning began."""
        try:
            self._note_starts(plan)
            batch = self._builder.build(plan)
        except Exception as error:  # noqa: BLE001 - the plan's requests fail with it, others go on
            self._apply_failure(plan, error)
        else:
            self._executor.launch(plan, batch, self._scheduler.take_saves())
            self._step_timing.note_plan(batch.num_tokens, (time.thread_time_ns() - started_ns) / 1e9)

    def _note_starts(self, plan: Plan) -> None:
        now_s = self._clock()
        for sequence in plan.slot_init_sequences:
            if sequence.queue_s is None:
                sequence.queue_s = now_s - next(iter(sequence.subscribers)).arrived_s

    def _apply(self, result: StepResult) -> None:
        """Each sampled token goes to its subscribers. A fault of ours ends the requests whose it is, no others."""
        plan, board = result.plan, self._board
        num_tokens = sum(plan.lengths)
        board.steps += 1
        board.computed_tokens += num_tokens
        board.observe_step(int(1e6 * result.step_s), len(plan), num_tokens)
        self._step_timing.note_result(0 if result.error is not None else num_tokens, result.step_s, result.launch_s)
        if result.error is not None:
            self._apply_failure(plan, result.error)
            return
        if plan:
            self._num_failed_steps = 0
        token_ids = _by_row(result)
        slow = self._delivery.deliver_fast_path(plan, token_ids)
        board.generated_tokens += len(plan) - len(slow)
        faults = {plan.logit_rows[place]: fault for place, fault in result.faults.items()}
        logprobs = {} if result.logprobs is None else _by_index(plan, result.logprobs)
        for index in slow:
            if index in faults:
                self._fail_constrained(plan, index, faults[index])
            else:
                self._apply_row(plan, index, token_ids[index], logprobs.get(index))
        for index in result.stops:
            sequence = plan.sequences[index]
            if sequence.generation == plan.generations[index]:
                # Who came while the executor saw the others' end wants more: rows planned since were dropped.
                sequence.rewind(plan.ends[index])

    def _fail_constrained(self, plan: Plan, index: int, fault: str) -> None:
        """A grammar met its limits in the middle of an answer."""
        sequence = plan.sequences[index]
        if sequence.generation == plan.generations[index]:
            self._delivery.fail(sequence, FailureCode.BAD_GRAMMAR, fault)

    def _apply_row(self, plan: Plan, index: int, token_id: int, logprobs: EventLogprobs | None) -> None:
        sequence = plan.sequences[index]
        if sequence.generation != plan.generations[index]:
            self._board.wasted_tokens += plan.lengths[index]
            return
        try:
            self._scheduler.note_computed(sequence, plan.ends[index])
            if token_id == NOT_FINITE:
                logger.error("the logits of a row are not finite; its requests fail")
                self._scheduler.invalidate_tenant(sequence)
                self._delivery.fail(sequence)
            elif token_id != NO_SAMPLE:
                self._board.generated_tokens += 1
                self._delivery.deliver(sequence, token_id, logprobs)
        except Exception:
            logger.exception("what a row brought could not be taken in; its requests fail")
            self._delivery.fail(sequence)

    def _apply_failure(self, plan: Plan, error: Exception) -> None:
        """A step of one row was that row's fault. Of several it is not known whose: they run again in halves, so that
        the guilty one ends up alone, and who shared a step with it goes on."""
        logger.error("a step of %d rows failed", len(plan), exc_info=error)
        self._num_failed_steps += 1
        if self._num_failed_steps >= _MAX_FAILED_STEPS:
            raise ExecutorFailed(f"{self._num_failed_steps} steps in a row have failed") from error
        rows = zip(plan.sequences, plan.generations, plan.lengths, strict=True)
        live = [(sequence, length) for sequence, generation, length in rows if sequence.generation == generation]
        self._board.wasted_tokens += sum(plan.lengths) - sum(length for _, length in live)
        if len(plan) > 1 and not isinstance(error, DeviceLost):
            self._scheduler.bisect(live)
            return
        for sequence, _ in live:
            self._delivery.fail(sequence)

    def _show_on_board(self) -> None:
        board = self._board
        board.running = self._scheduler.num_running
        board.waiting = self._scheduler.num_waiting
        board.pages_used = self._scheduler.num_pages_held
        board.pages_idle = self._scheduler.num_pages_idle
        board.preemptions = self._scheduler.num_preemptions
        host = self._scheduler.host_offload
        board.host_pages_used, board.pages_saved, board.pages_restored = (
            host.num_used,
            host.num_saved,
            host.num_restored,
        )
        board.draining = int(self._drain_deadline_s is not None)
        running_s = self._executor.running_s()
        if running_s >= _DEAD_STEP_S:
            raise ExecutorFailed(f"the running step has not ended in {running_s:.0f} s")
        if running_s < _HUNG_STEP_S:
            board.heartbeat_ns = time.monotonic_ns()

    def check_integrity(self) -> None:
        """Raises RuntimeError unless requests, sequences, pages and slots all account for each other."""
        self._scheduler.check_integrity()
        self._open_requests.check_integrity(self._scheduler.num_running + self._scheduler.num_waiting)


def _by_row(result: StepResult) -> list[int]:
    """The sampled token of each row, or NO_SAMPLE."""
    plan = result.plan
    if len(plan.logit_rows) == len(plan):
        return result.token_ids
    token_ids = [NO_SAMPLE] * len(plan)
    for index, token_id in zip(plan.logit_rows, result.token_ids, strict=True):
        token_ids[index] = token_id
    return token_ids


def _by_index(plan: Plan, logprobs: TokenLogprobs) -> dict[int, EventLogprobs]:
    """By row: each with as many of the likeliest tokens as its sequence asks for."""
    columns = zip(logprobs.rows.tolist(), logprobs.chosen.tolist(), logprobs.ranks.tolist(), strict=True)
    entries = {}
    for place, (row, chosen, rank) in enumerate(columns):
        index = plan.logit_rows[row]
        width = plan.sequences[index].sampling.num_logprobs
        top_ids, top = logprobs.top_ids[place, :width].tolist(), logprobs.top[place, :width].tolist()
        entries[index] = EventLogprobs(0, chosen, rank, tuple(top_ids), tuple(top))
    return entries
