"""The loop: receive → apply → plan → launch → flush. A collaborator does each of these."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.engine.steps.executor import ExecutorFailed
from penstock.backend.engine.steps.rows_of_results import logprobs_by_row, scored_entries, tokens_by_row
from penstock.backend.forward_pass import NOT_FINITE, DeviceLost
from penstock.backend.scheduling.step_plan import NO_SAMPLE
from penstock.shm.link.events import Cancellation, FrontendDeath, Question, Submission
from penstock.shm.messages import AskStream, CancelOther, ChangeAdapter, EventLogprobs, FailureCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.engine.interfaces import IEngineLink, IExecutor, ISequenceScheduler
    from penstock.backend.engine.requests.handling import RequestHandling
    from penstock.backend.engine.steps.batch_builder import BatchBuilder, WholeBatchBuilder
    from penstock.backend.engine.steps.draft_desk import DraftDesk
    from penstock.backend.engine.steps.launched_step import StepResult
    from penstock.backend.engine.steps.step_timing import StepTiming
    from penstock.backend.engine.steps.vectors import Vectors
    from penstock.backend.forward_pass import TokenLogprobs
    from penstock.backend.scheduling.step_plan import Plan
    from penstock.backend.sequences.sequence import Sequence
    from penstock.process.heartbeat import SignOfLife
    from penstock.shm.link.kv_event_publisher import KvEventPublisher
    from penstock.shm.memory.board import BackendBoard

logger = logging.getLogger("penstock.backend")

_IDLE_TURN_S = 0.5
"""The loop turns at least this often, so that its heartbeat on the board stays fresh."""
_HUNG_STEP_S = 60.0
"""A step that runs longer counts as hung: the heartbeat stops, and the frontends report not ready."""
_DEAD_STEP_S = 300.0
"""A step that runs longer will not end: the process exits, to be restarted."""
_MAX_FAILED_STEPS = 16
"""More failed steps in a row than this cannot be the requests' fault."""


class Engine:
    """Turns the loop on the main thread."""

    def __init__(
        self,
        link: IEngineLink,
        executor: IExecutor,
        scheduler: ISequenceScheduler,
        builder: BatchBuilder | WholeBatchBuilder,
        requests: RequestHandling,
        board: BackendBoard,
        clock: Callable[[], float] = time.monotonic,
        *,
        step_timing: StepTiming | None = None,
        heartbeat: SignOfLife | None = None,
        kv_events: KvEventPublisher | None = None,
    ) -> None:
        """heartbeat shows each turn to the process that supervises this one, even if the device hangs.

        kv_events collects the reports of the scheduler's pages, and sends them once a turn.
        """
        self._link = link
        self._executor = executor
        self._scheduler = scheduler
        self._builder = builder
        self._open_requests = requests.table
        self._intake, self._delivery = requests.intake, requests.delivery
        self._vector_delivery = requests.vector_delivery
        self._canceller = requests.canceller
        self._streams = requests.streams
        self._adapters, self._pictures = requests.adapters, requests.pictures
        self._board = board
        self._clock = clock
        self._step_timing = step_timing or requests.step_timing
        self._heartbeat = heartbeat
        self._kv_events = kv_events
        self.draft_desk: DraftDesk | None = None
        """Asks a draft model before plans, if there is one."""
        self._recorder = requests.table.recorder
        self._drain_deadline_s: float | None = None
        self._work: Callable[[], None] | None = None
        """Work of the next turn, from a signal handler."""
        self._num_failed_steps = 0
        """Failed steps in a row."""
        self._has_drafts = False
        """The last launched step has drafts: until its result is applied, no later token's position is known."""
        self._ended_s = 0.0
        """When the step ended that was applied in this turn; 0 if none was, or it is unknown."""
        self.plan_due_s: float | None = None
        """Seconds from the end of the last turn to the next plan; None if no plan is due before an event."""

    def run(self) -> None:
        """Serve until `drain` was called and nothing runs, or its time is up. Raises ExecutorFailed."""
        while True:
            self.turn()
            if self._is_drained():
                return
            self._link.wait(self.next_turn_s(), self._executor.wake_fd)

    def next_turn_s(self) -> float:
        """Seconds after which the next turn is due even if nothing happens."""
        at_most_s = 0.0 if self._open_requests.quote_queue.num_waiting else _IDLE_TURN_S
        at_most_s = at_most_s if self.plan_due_s is None else min(at_most_s, self.plan_due_s)
        at_most_s = self._open_requests.restart_grace.next_due_s(at_most_s)
        return self._streams.next_due_s(self._canceller.next_due_s(at_most_s))

    def turn(self) -> None:
        """One turn of the loop. Cancellations take effect here, before the next plan. Never blocks."""
        self._executor.clear_wake()
        if (work := self._work) is not None:
            self._work = None
            work()
        if self._recorder is not None:
            self._recorder.turn_began_s = self._clock()
        for event in self._link.receive():
            if self._recorder is not None:
                self._recorder.note_event(event)
            match event:
                case Submission():
                    self._intake.submit(event)
                case Question(frontend, CancelOther() as cancel):
                    self._canceller.cancel_for_operator(frontend, cancel.request_id, cancel.target)
                case Question(frontend, AskStream() as ask):
                    self._streams.answer(frontend, ask)
                case Question(frontend, ChangeAdapter() as order):
                    self._adapters.change(frontend, order)
                case Cancellation(frontend, request_id, noticed_ns, keep):
                    self._canceller.cancel(frontend, request_id, noticed_ns, keep)
                    self._adapters.cancel(frontend, request_id)
                case FrontendDeath(frontend):
                    self._canceller.drop_frontend(frontend)
                    self._adapters.cancel(frontend)
        self._adapters.turn()
        self._canceller.expire()
        self._intake.submit_compiled()
        self._intake.make_quotes()
        self._streams.expire(is_draining=self._intake.is_draining)
        for result in self._executor.results():
            self._apply(result)
            if isinstance(result.error, DeviceLost):
                self._link.flush()  # requests of that step fail; the frontends resubmit all others
                raise ExecutorFailed("the device is lost") from result.error
        self._intake.readmit_separated()
        self._intake.admit_after_grace()
        if self._pictures is not None:
            self._pictures.take_results()
        self.plan_due_s = self._plan_steps()
        if self._pictures is not None:
            self._pictures.start_next()
        self._ended_s = 0.0
        for sequence in self._scheduler.take_preempted():
            if self._recorder is not None:
                self._recorder.note_preemption(sequence)
            self._delivery.note_preemption(sequence)
        self._intake.announce_room()
        self._link.flush()
        if self._kv_events is not None:
            self._kv_events.publish()
        self._update_board()

    def drain(self, timeout_s: float) -> None:
        """Refuse new requests from now on. `run` returns when all have ended, or after timeout_s. Safe in a signal
        handler."""
        self._intake.is_draining = True
        self._drain_deadline_s = self._clock() + timeout_s
        self._executor.wake()

    def call_soon(self, work: Callable[[], None]) -> None:
        """Do this in the next turn. Safe in a signal handler."""
        self._work = work
        self._executor.wake()

    def _is_drained(self) -> bool:
        if self._drain_deadline_s is None:
            return False
        return self._clock() >= self._drain_deadline_s or not (self._open_requests.num_open or self._executor.is_busy)

    def _plan_steps(self) -> float | None:
        """Plan and launch the steps that are due. Returns the seconds until the next plan is due."""
        while self._scheduler.has_work and self._executor.has_capacity:
            if self._has_drafts and self._executor.is_busy:
                return None
            if self.draft_desk is not None and self.draft_desk.holds_plan():
                return None
            if (spare_s := self._step_timing.spare_s(self._executor.running_s())) > 0:
                return spare_s
            started_ns = time.thread_time_ns()
            if not (plan := self._scheduler.plan()):
                return None
            if self.plan_due_s is not None and not self._executor.is_busy:
                self._step_timing.note_late()
            self._launch(plan, started_ns)
        return None

    def _launch(self, plan: Plan, started_ns: int) -> None:
        """started_ns is the thread's CPU time at which planning began."""
        try:
            self._note_starts(plan)
            batch = self._builder.build(plan)
        except Exception as error:  # noqa: BLE001 - fails the plan's requests; others go on
            self._apply_failure(plan, error)
        else:
            if self._recorder is not None:
                self._recorder.note_plan(plan, batch)
            self._executor.launch(plan, batch, self._scheduler.take_saves())
            if self._has_drafts and self._ended_s:
                self._step_timing.note_gap(self._clock() - self._ended_s)
            self._has_drafts = bool(plan.drafts)
            self._step_timing.note_plan(batch.num_tokens, (time.thread_time_ns() - started_ns) / 1e9)

    def _note_starts(self, plan: Plan) -> None:
        now_s = self._clock()
        for sequence in plan.slot_init_sequences:
            if sequence.queue_s is None:
                sequence.queue_s = now_s - next(iter(sequence.subscribers)).arrived_s

    def _apply(self, result: StepResult) -> None:
        """Deliver the step's tokens. An error of a step fails the requests that caused it, no others."""
        plan, board = result.plan, self._board
        self._scheduler.note_step_ended()
        self._ended_s = result.ended_s
        num_tokens = plan.num_tokens
        board.steps += 1
        board.computed_tokens += num_tokens
        board.drafted_tokens += num_tokens - sum(plan.lengths)
        board.accepted_tokens += sum(map(len, result.accepted.values()))
        board.observe_step(int(1e6 * result.step_s), len(plan), num_tokens)
        if self._recorder is not None:
            self._recorder.note_result(result)
        self._step_timing.note_result(0 if result.error is not None else num_tokens, result.step_s, result.launch_s)
        if result.error is not None:
            self._apply_failure(plan, result.error)
            return
        if plan:
            self._num_failed_steps = 0
        if result.scored is not None:
            self._apply_scored(plan, result.scored)
        if plan.pooled_rows:
            self._apply_pooled(plan, result.vectors)
            if len(plan.pooled_rows) == len(plan):
                return
        token_ids = tokens_by_row(result)
        slow_rows = self._delivery.deliver_fast_path(plan, token_ids, result.accepted)
        board.generated_tokens += len(plan) - len(slow_rows)
        faults = {plan.logit_rows[place]: fault for place, fault in result.faults.items()}
        pooled = set(plan.pooled_rows)
        logprobs = {} if result.logprobs is None else logprobs_by_row(plan, result.logprobs)
        for index in slow_rows:
            if index in faults:
                self._fail_constrained(plan, index, faults[index])
            elif index in result.late:
                self._run_again(plan, index)
            elif index not in pooled:
                tokens = *result.accepted.get(index, ()), token_ids[index]
                for end, token_id in enumerate(tokens, start=plan.ends[index]):
                    self._apply_row(plan, index, end, token_id, logprobs.get(index))
        for index in result.stops:
            sequence = plan.sequences[index]
            if sequence.generation == plan.generations[index]:
                # A subscriber that joined after the executor saw the stop continues. Rows planned since were dropped.
                self._scheduler.rewind(sequence, plan.ends[index] + len(result.accepted.get(index, ())))

    def _apply_scored(self, plan: Plan, scored: TokenLogprobs) -> None:
        """Deliver log probabilities of prompts. They come before the tokens of the same step."""
        generations = dict(zip(plan.sequences, plan.generations, strict=True))
        place = 0
        for sequence, (first, end) in plan.scored.items():
            part = slice(place, place + end - first)
            place = part.stop
            if sequence.generation != generations[sequence]:
                continue
            try:
                if np.isnan(scored.chosen[part]).any():
                    self._fail_not_finite(sequence)
                else:
                    entries = scored_entries(scored, part, first + 1, sequence.num_prompt_logprobs)
                    self._delivery.deliver_scored(sequence, entries)
            except Exception:  # as broad as in `_apply_row`, for the same reason
                logger.exception("log probabilities of a prompt could not be delivered; its requests fail")
                self._delivery.fail(sequence)

    def _apply_pooled(self, plan: Plan, vectors: list[Vectors | None]) -> None:
        finished = []
        for index, its_vectors in zip(plan.pooled_rows, vectors, strict=True):
            sequence = plan.sequences[index]
            if sequence.generation != plan.generations[index]:
                self._board.wasted_tokens += plan.lengths[index]
                continue
            try:
                self._scheduler.note_computed(sequence, plan.ends[index])
                if its_vectors is None:
                    self._fail_not_finite(sequence)
                else:
                    finished.append((sequence, its_vectors))
            except Exception:  # as broad as in `_apply_row`, for the same reason
                logger.exception("a row's vector could not be taken; its requests fail")
                self._delivery.fail(sequence)
        self._vector_delivery.deliver(finished)

    def _fail_not_finite(self, sequence: Sequence) -> None:
        logger.error("a row's result is not finite; its requests fail and its tenant's cached pages are dropped")
        self._scheduler.invalidate_tenant(sequence)
        self._delivery.fail(sequence)

    def _fail_constrained(self, plan: Plan, index: int, fault: str) -> None:
        """Fail this row: its grammar reached its limits in the middle of an answer."""
        sequence = plan.sequences[index]
        if sequence.generation == plan.generations[index]:
            self._delivery.fail(sequence, FailureCode.BAD_GRAMMAR, fault)

    def _run_again(self, plan: Plan, index: int) -> None:
        """Run the row again: its mask was not ready when its token was due.

        Its last known token is computed again, in a later step that samples.
        """
        sequence, num_computed = plan.sequences[index], plan.ends[index] - 1
        self._board.wasted_tokens += 1
        if sequence.generation != plan.generations[index]:
            return
        try:
            self._scheduler.note_computed(sequence, num_computed)
            self._scheduler.rewind(sequence, num_computed)
        except Exception:  # as broad as in `_apply_row`, for the same reason
            logger.exception("a row could not be planned again; its requests fail")
            self._delivery.fail(sequence)

    def _apply_row(self, plan: Plan, index: int, end: int, token_id: int, logprobs: EventLogprobs | None) -> None:
        """token_id is what was sampled after the sequence's first `end` tokens."""
        sequence = plan.sequences[index]
        if sequence.generation != plan.generations[index]:
            self._board.wasted_tokens += plan.lengths[index]
            return
        try:
            self._scheduler.note_computed(sequence, end)
            if token_id == NOT_FINITE:
                self._fail_not_finite(sequence)
            elif token_id != NO_SAMPLE:
                self._board.generated_tokens += 1
                self._delivery.deliver(sequence, token_id, logprobs)
            else:
                self._delivery.report_progress(sequence, end, self._clock())
        except Exception:  # deliberately broad: a bug that one row triggers must not end the other rows' requests
            logger.exception("a row's token could not be delivered; its requests fail")
            self._delivery.fail(sequence)

    def _apply_failure(self, plan: Plan, error: Exception) -> None:
        """Fail the row of a failed step, or bisect a step of several rows.

        Its rows run again in halves until the row that causes the error is alone, and the others continue.
        """
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

    def _update_board(self) -> None:
        board, scheduler, host = self._board, self._scheduler, self._scheduler.host_offload
        if self._heartbeat is not None:
            self._heartbeat.beat()
        board.running = running = scheduler.num_running
        board.waiting = waiting = scheduler.num_waiting + len(self._open_requests.restart_grace)
        board.pages_used = pages_held = scheduler.num_pages_held
        board.pages_idle = pages_idle = scheduler.num_pages_idle
        board.checkpoint_bytes = scheduler.checkpoint_bytes
        board.preemptions = scheduler.num_preemptions
        board.host_pages_used, board.pages_saved, board.pages_restored = (
            host.num_used,
            host.num_saved,
            host.num_restored,
        )
        board.draining = int(self._drain_deadline_s is not None)
        if self._recorder is not None:
            self._recorder.end_turn(self._clock(), running, waiting, pages_held, pages_idle)
        running_s = self._executor.running_s()
        if running_s >= _DEAD_STEP_S:
            raise ExecutorFailed(f"the running step has not ended in {running_s:.0f} s")
        if running_s < _HUNG_STEP_S:
            board.heartbeat_ns = time.monotonic_ns()

    def check_integrity(self) -> None:
        """Raises RuntimeError unless requests, sequences, pages and slots all account for each other."""
        self._scheduler.check_integrity()
        num_scheduled = self._scheduler.num_running + self._scheduler.num_waiting
        self._open_requests.check_integrity(num_scheduled + len(self._open_requests.restart_grace))
        self._streams.check_integrity()
