"""The loop: receive → apply → plan → launch → flush. All that it does is done by a collaborator."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from backend.forward_pass import SamplingParams
from backend.sampler import NOT_FINITE
from backend.sequence import Sequence, Subscriber
from shm.link import Cancellation, FrontendDeath, Submission
from shm.wire import Failure, FailureCode, Finish, Started

if TYPE_CHECKING:
    from backend.batch_builder import BatchBuilder
    from backend.executor import Executor, StepResult
    from backend.scheduler import Row, Scheduler
    from shm.board import BackendBoard
    from shm.link import BackendLink

logger = logging.getLogger("penstock.backend")

_IDLE_TURN_S = 0.5
"""The loop turns at least this often, so that its heartbeat on the board stays fresh."""
_HUNG_STEP_S = 60.0
"""A step that runs longer is taken for hung: the heartbeat stops, and frontends turn not ready."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a single request may ask of this engine, and how many may wait."""

    vocab_size: int
    max_context_tokens: int
    max_waiting: int


class Engine:
    """Owns the sequences of all frontends, each by (frontend, request id), from submission to end."""

    def __init__(
        self,
        link: BackendLink,
        executor: Executor,
        scheduler: Scheduler,
        builder: BatchBuilder,
        board: BackendBoard,
        limits: Limits,
    ) -> None:
        self._link = link
        self._executor = executor
        self._scheduler = scheduler
        self._builder = builder
        self._board = board
        self._limits = limits
        self._sequences: dict[int, dict[int, Sequence]] = {}
        self._drain_deadline_s: float | None = None

    def run(self) -> None:
        """Serves until `drain` was called and nothing runs, or its time is up."""
        while not self._is_drained():
            self.turn()
            self._link.wait(_IDLE_TURN_S, self._executor.wake_fd)

    def turn(self) -> None:
        """One turn of the loop. Cancellations take effect here, before the next plan; never blocks."""
        self._executor.clear_wake()
        for arrival in self._link.receive():
            match arrival:
                case Submission():
                    self._submit(arrival)
                case Cancellation(frontend, request_id):
                    self._cancel(frontend, request_id)
                case FrontendDeath(frontend):
                    self._drop_frontend(frontend)
        for result in self._executor.results():
            self._apply(result)
        while self._executor.has_room and (rows := self._scheduler.plan()):
            self._note_starts(rows)
            self._executor.launch(rows, self._builder.build(rows))
        self._link.flush()
        self._show_on_board()

    def drain(self, timeout_s: float) -> None:
        """No new requests from now on; `run` returns when all ended, or after timeout_s. Safe in a signal handler."""
        self._drain_deadline_s = time.monotonic() + timeout_s
        self._executor.wake()

    @property
    def num_open(self) -> int:
        """Requests not yet ended."""
        return sum(len(sequences) for sequences in self._sequences.values())

    def check_integrity(self) -> None:
        """Raises RuntimeError unless the scheduler holds the sequences of the open requests, and no others."""
        self._scheduler.check_integrity()
        in_scheduler = self._scheduler.num_running + self._scheduler.num_waiting
        if in_scheduler != self.num_open:
            raise RuntimeError(f"{in_scheduler} sequences are scheduled for {self.num_open} open requests")

    def _is_drained(self) -> bool:
        if self._drain_deadline_s is None:
            return False
        return time.monotonic() >= self._drain_deadline_s or (self.num_open == 0 and not self._executor.is_busy)

    def _submit(self, submission: Submission) -> None:
        if (failure := self._refusal(submission)) is not None:
            self._link.push(submission.frontend, submission.request_id, -1, Finish.REJECTED, failure=failure)
            self._board.requests_rejected += 1
            return
        sequence = Sequence(
            Subscriber(
                submission.frontend,
                submission.request_id,
                submission.max_tokens,
                frozenset(submission.stop_token_ids),
            ),
            submission.tokens,
            submission.num_prompt_tokens,
            SamplingParams(**msgspec.structs.asdict(submission.sampling)),
            self._limits.max_context_tokens,
            time.monotonic(),
        )
        if len(sequence.tokens) >= sequence.max_total_tokens:
            self._link.push(submission.frontend, submission.request_id, -1, Finish.LENGTH)
            return
        self._sequences.setdefault(submission.frontend, {})[submission.request_id] = sequence
        self._scheduler.add(sequence)
        self._board.prompt_tokens += submission.num_prompt_tokens

    def _refusal(self, submission: Submission) -> Failure | None:
        """Frontends check all this for the sake of the message; here it is checked for the sake of the engine."""
        limits = self._limits
        tokens = np.frombuffer(submission.tokens, np.int32)
        request_id = submission.request_id
        if self._drain_deadline_s is not None:
            return Failure(request_id, FailureCode.SHUTTING_DOWN)
        if self._scheduler.num_waiting >= limits.max_waiting:
            return Failure(request_id, FailureCode.OVERLOADED, limits.max_waiting)
        if request_id in self._sequences.get(submission.frontend, {}):
            return Failure(request_id, FailureCode.INTERNAL)
        if not 1 <= submission.num_prompt_tokens <= len(tokens) or len(tokens) > limits.max_context_tokens:
            return Failure(request_id, FailureCode.CONTEXT_TOO_LONG, limits.max_context_tokens)
        bias_ids = [token_id for token_id, _ in submission.sampling.logit_bias]
        if tokens.min() < 0 or max(int(tokens.max()), *bias_ids, 0) >= limits.vocab_size:
            return Failure(request_id, FailureCode.BAD_TOKEN, limits.vocab_size)
        return None

    def _note_starts(self, rows: list[Row]) -> None:
        now_s = time.monotonic()
        for row in rows:
            if row.takes_slot and row.generation == 0:
                row.sequence.queue_s = now_s - row.sequence.arrived_s

    def _cancel(self, frontend: int, request_id: int) -> None:
        """Unknown ids are normal: a cancel crosses the end of its request, and may come twice."""
        if (sequence := self._sequences.get(frontend, {}).pop(request_id, None)) is not None:
            self._scheduler.remove(sequence)
            self._board.requests_cancelled += 1

    def _drop_frontend(self, frontend: int) -> None:
        for sequence in self._sequences.pop(frontend, {}).values():
            self._scheduler.remove(sequence)
            self._board.requests_cancelled += 1

    def _apply(self, result: StepResult) -> None:
        """Each sampled token goes to its subscriber; a failed step ends the requests that were in it, and no others."""
        self._board.steps += 1
        if result.error is not None:
            logger.error("a step of %d rows failed", len(result.rows), exc_info=result.error)
            for row in result.rows:
                if not row.sequence.ended and row.sequence.generation == row.generation:
                    self._fail(row.sequence)
            return
        token_ids = iter(result.token_ids)
        for row in result.rows:
            if not row.samples:
                continue
            token_id = next(token_ids)
            sequence = row.sequence
            if sequence.ended or sequence.generation != row.generation:
                continue
            if token_id == NOT_FINITE:
                logger.error("the logits of a row are not finite; its request fails")
                self._fail(sequence)
            else:
                self._deliver(sequence, token_id)

    def _deliver(self, sequence: Sequence, token_id: int) -> None:
        sequence.num_pending -= 1
        sequence.tokens.append(token_id)
        self._board.generated_tokens += 1
        subscriber = sequence.subscriber
        started = None
        if not sequence.is_started:
            sequence.is_started = True
            started = Started(subscriber.request_id, 0, sequence.queue_s)
        if token_id in subscriber.stop_token_ids:
            finish = Finish.STOP
        elif len(sequence.tokens) >= sequence.max_total_tokens:
            finish = Finish.LENGTH
        else:
            finish = Finish.NONE
        self._link.push(subscriber.frontend, subscriber.request_id, token_id, finish, started=started)
        if finish is not Finish.NONE:
            self._forget(sequence)
            self._board.requests_finished += 1

    def _fail(self, sequence: Sequence) -> None:
        subscriber = sequence.subscriber
        failure = Failure(subscriber.request_id, FailureCode.INTERNAL)
        self._link.push(subscriber.frontend, subscriber.request_id, -1, Finish.FAILED, failure=failure)
        self._forget(sequence)
        self._board.requests_failed += 1

    def _forget(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        del self._sequences[sequence.subscriber.frontend][sequence.subscriber.request_id]

    def _show_on_board(self) -> None:
        board = self._board
        board.running = self._scheduler.num_running
        board.waiting = self._scheduler.num_waiting
        board.pages_used = self._scheduler.num_pages_held
        board.preemptions = self._scheduler.num_preemptions
        board.draining = int(self._drain_deadline_s is not None)
        if self._executor.running_s() < _HUNG_STEP_S:
            board.heartbeat_ns = time.monotonic_ns()
