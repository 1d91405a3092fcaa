"""Takes in submissions: refuses one, lets it wait for its grammar, or gives it a sequence."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.backend.engine.coalescer import Candidate, PooledKey, Presented, ShareKey, num_prompt_logprobs
from penstock.backend.engine.quoting.quote_queue import WaitingForQuote
from penstock.backend.forward_pass import FROM_EMBEDDINGS, NO_ADAPTER, SamplingParams
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.subscribers import Subscriber
from penstock.backend.structured_output.constraints import SequenceConstraints
from penstock.process.admission import has_place, is_over_share
from penstock.shm.link.events import carries
from penstock.shm.messages import AskQuote, Failure, FailureCode, Finish, Generate, Pool

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.engine.interfaces import ISequenceScheduler
    from penstock.backend.engine.pictures.desk import PictureDesk
    from penstock.backend.engine.quoting.quoter import Quoter
    from penstock.backend.engine.requests.delivery import Delivery
    from penstock.backend.engine.requests.limits import EngineLimits
    from penstock.backend.engine.requests.request_table import RequestTable
    from penstock.backend.engine.requests.stream_table import StreamTable
    from penstock.backend.engine.requests.vector_delivery import VectorDelivery
    from penstock.backend.structured_output.compile_grammar import CompiledGrammar
    from penstock.shm.link.events import Submission
    from penstock.shm.memory.board import BackendBoard
    from penstock.shm.messages import PromptHeader, TextHeader

logger = logging.getLogger("penstock.backend")

_EMBEDDED = np.int32(FROM_EMBEDDINGS).tobytes()
_NO_SAMPLING = SamplingParams(temperature=0.0)
"""Used as the sampling of pooled requests, which sample nothing."""


class Intake:
    """From a submission to a sequence. An error of ours in between fails this one request."""

    def __init__(
        self,
        scheduler: ISequenceScheduler,
        board: BackendBoard,
        limits: EngineLimits,
        open_requests: RequestTable,
        delivery: Delivery,
        vector_delivery: VectorDelivery,
        streams: StreamTable,
        clock: Callable[[], float],
        quoter: Quoter,
        pictures: PictureDesk | None = None,
    ) -> None:
        self._quoter, self._pictures = quoter, pictures
        self._scheduler = scheduler
        self._board = board
        self.limits = limits
        self._open_requests, self._coalescer = open_requests, open_requests.coalescer
        self._delivery = delivery
        self._vector_delivery = vector_delivery
        self._streams = streams
        self._clock = clock
        self.is_draining = False
        """New requests are refused."""
        self._refused_frontends: set[int] = set()
        """Frontends that wait for room: a full wait queue has refused pooled requests of theirs."""

    def submit(self, submission: Submission[PromptHeader], arrived_s: float | None = None) -> None:
        """Take in a request. arrived_s is given for one that is taken in again."""
        try:
            if arrived_s is None:
                arrived_s = self._clock()
            if submission.embeddings is not None:
                submission = replace(submission, tokens=_EMBEDDED * submission.message.num_prompt_tokens)
            if carries(submission, Generate):
                self._generate(submission, arrived_s)
            elif carries(submission, Pool):
                self.pool(submission, arrived_s)
            elif carries(submission, AskQuote):
                self._ask_quote(submission, arrived_s)
        # Deliberately broad: no request's content may end the loop. _abandon logs the traceback.
        except Exception:  # noqa: BLE001
            self._abandon(submission.frontend, submission.request_id)

    def submit_compiled(self) -> None:
        """Take in the requests whose grammar has been compiled since the last call."""
        for waiting, outcome in self._open_requests.grammar_queue.take_settled():
            submission = waiting.submission
            if isinstance(outcome, Failure):
                self._reject(submission, outcome)
                continue
            try:
                self._enter(submission, outcome, waiting.arrived_s)
            except Exception:  # noqa: BLE001 - as broad as in `submit`, for the same reason
                self._abandon(submission.frontend, submission.request_id)
        if self.is_draining:
            for submission in self._open_requests.grammar_queue.drain(self._clock()):
                self._reject(submission, Failure(submission.request_id, FailureCode.SHUTTING_DOWN))

    def _generate(self, submission: Submission[Generate], arrived_s: float) -> None:
        if not self.is_draining and self._streams.resume(submission):
            return
        refusal = self.find_refusal(submission) or self.limits.find_fault(submission)
        if (refusal := refusal or self._streams.find_refusal(submission)) is not None:
            self._reject(submission, refusal)
            return
        constraints, grammar = submission.message.constraints, None
        if constraints is not None and constraints.grammar is not None:
            deadline_s = submission.deadline_s(arrived_s)
            grammar_queue = self._open_requests.grammar_queue
            compiled = grammar_queue.submit(submission, constraints.grammar, arrived_s, deadline_s)
            if isinstance(compiled, Failure):
                self._reject(submission, compiled)
                return
            if compiled is None:  # continues in `submit_compiled`
                self._open_requests.deadlines.note(submission.frontend, submission.request_id, deadline_s)
                return
            grammar = compiled
        self._enter(submission, grammar, arrived_s)

    def _enter(self, submission: Submission[Generate], grammar: CompiledGrammar | None, arrived_s: float) -> None:
        """Give the request a sequence, or let it wait for its quote. One that was admitted before is not quoted."""
        if submission.message.refuse_late is None or submission.message.admitted_ns:
            self.assign_sequence(submission, grammar, arrived_s)
        else:
            self._await_quote(WaitingForQuote(submission, arrived_s, submission.deadline_s(arrived_s), grammar))

    def _ask_quote(self, submission: Submission[AskQuote], arrived_s: float) -> None:
        if (refusal := self.find_refusal(submission) or self.limits.find_fault(submission)) is not None:
            self._reject(submission, refusal)
        else:
            self._await_quote(WaitingForQuote(submission, arrived_s, submission.deadline_s(arrived_s)))

    def _await_quote(self, waiting: WaitingForQuote) -> None:
        """Continues in `make_quotes`."""
        self._open_requests.quote_queue.add(waiting)
        self._open_requests.deadlines.note(*waiting.key, waiting.deadline_s)

    def make_quotes(self) -> None:
        """Make the turn's quotes. Call it when all arrivals are taken in: then the quotes share one view of them."""
        self._quoter.begin_turn()
        for waiting in self._open_requests.quote_queue.take_turn():
            submission = waiting.submission
            try:
                if carries(submission, Generate):
                    self.assign_sequence(submission, waiting.grammar, waiting.arrived_s)
                elif carries(submission, AskQuote):
                    self._quote(submission, waiting.arrived_s)
            except Exception:  # noqa: BLE001 - as broad as in `submit`, for the same reason
                self._abandon(submission.frontend, submission.request_id)
        try:
            self._quoter.quote_sample()
        except Exception:  # a sample measures only: its request goes on
            logger.exception("a request could not be quoted")

    def _quote(self, submission: Submission[AskQuote], arrived_s: float) -> None:
        if (candidate := self._text_candidate(submission, arrived_s)) is None:
            return
        if self._finds_no_place(candidate):
            self._reject(submission, self._overloaded(submission.message))
        else:
            self._delivery.end_with_quote(submission.frontend, self._quoter.quote(submission.message, candidate))

    def find_refusal(self, submission: Submission[PromptHeader]) -> Failure | None:
        """Why no request can be taken in now, whatever it asks for."""
        limits, message = self.limits, submission.message
        request_id = message.request_id
        if self.is_draining:
            return Failure(request_id, FailureCode.SHUTTING_DOWN)
        max_open = limits.max_open_resumed if message.admitted_ns else limits.max_open
        if self._open_requests.num_open >= max_open and (
            message.admitted_ns or is_over_share(self._open_requests.num_open_of_each(), message.tenant, max_open)
        ):
            return Failure(request_id, FailureCode.OVERLOADED, max_open)
        if self._open_requests.is_open(submission.frontend, request_id):
            return Failure(request_id, FailureCode.INTERNAL)
        return None

    def assign_sequence(
        self, submission: Submission[Generate], grammar: CompiledGrammar | None, arrived_s: float
    ) -> None:
        """Join a valid request to an equal one's sequence, or start a new sequence. A full wait queue refuses it.

        grammar is this request's own copy, at its beginning.
        """
        message = submission.message
        if (candidate := self._text_candidate(submission, arrived_s)) is None:
            return
        is_full = self._finds_no_place(candidate)
        if not is_full and (late := self._quoter.find_late(message, candidate)) is not None:
            self._delivery.end_with_quote(submission.frontend, *late)
            return
        subscriber, is_shared = candidate.subscriber, candidate.key is not None
        subscriber.reports_progress = message.reports_progress
        if is_shared and subscriber.next_index > message.num_prompt_tokens:
            subscriber.resumed = submission
        if (joined := self._shorten_delayed(submission, candidate, grammar) or candidate.joinable) is not None:
            self._streams.enter(message, joined, subscriber)
            self._join(joined, candidate)
            self._quoter.note_request(message, joined, subscriber)
        elif is_full:
            self._reject(submission, self._overloaded(message))
        else:
            sequence = candidate.new_sequence(self._make_constraints(submission, grammar))
            sequence.pictures = None if self._pictures is None else self._pictures.pictures_of(message)
            sequence.output, sequence.num_prompt_logprobs = submission.output, num_prompt_logprobs(submission)
            if (is_shared or message.linger is not None) and candidate.sampling.num_logprobs >= 0:
                sequence.past_logprobs = []
            self._streams.enter(message, sequence, subscriber)
            self._begin(sequence, candidate)
            self._quoter.note_request(message, sequence, subscriber)

    def pool(self, submission: Submission[Pool], arrived_s: float) -> None:
        """Take in a request for a vector."""
        message, pooled = submission.message, submission.message.pooled
        if (refusal := self.find_refusal(submission) or self.limits.find_fault_of_pool(submission)) is not None:
            self._reject_pool(submission, refusal)
            return
        if self._vector_delivery.deliver_cached(submission):
            return
        subscriber = Subscriber.of(submission, arrived_s, message.num_prompt_tokens)
        subscriber.pooled = pooled
        candidate = self._candidate(submission, subscriber, _NO_SAMPLING, PooledKey.of(submission))
        if (joined := candidate.joinable) is not None:
            self._join(joined, candidate)
        elif self._finds_no_place(candidate):
            self._reject_pool(submission, self._overloaded(message))
        else:
            sequence = candidate.new_sequence()
            sequence.pooled = pooled
            if pooled.group:
                sequence.group = submission.frontend, pooled.group
            self._begin(sequence, candidate)

    def _begin(self, sequence: Sequence, candidate: Candidate) -> None:
        sequence.adapter = self.limits.adapters.get(candidate.submission.message.adapter, NO_ADAPTER)
        self._open_requests.add(sequence, candidate.subscriber)
        if not self._open_requests.restart_grace.delay(sequence):
            self._scheduler.add(sequence)
        self._board.prompt_tokens += sequence.num_prompt_tokens
        if candidate.key is not None:
            self._coalescer.offer(candidate.key, sequence, candidate.presented)

    def admit_after_grace(self) -> None:
        """Schedule sequences that came back from an earlier backend, once they are complete."""
        for sequence in self._open_requests.restart_grace.take_due():
            for subscriber in tuple(sequence.subscribers):
                try:
                    self._delivery.replay(sequence, subscriber)
                except Exception:  # noqa: BLE001 - as broad as in `submit`: the group's other requests go on
                    self._abandon(subscriber.frontend, subscriber.request_id)
            if not sequence.ended:
                try:
                    self._scheduler.add(sequence)
                except Exception:  # as broad as in `submit`: the other sequences go on
                    logger.exception("a sequence could not be scheduled; its requests fail")
                    self._delivery.fail(sequence)

    def announce_room(self) -> None:
        """Tell the frontends whose pooled requests were refused once any tenant's request finds a place again."""
        if (
            self._refused_frontends
            and self._num_waiting() < self.limits.max_waiting
            and self._open_requests.num_open < self.limits.max_open
        ):
            self._delivery.announce_room(self._refused_frontends)
            self._refused_frontends.clear()

    def readmit_separated(self) -> None:
        """Give each resumed request that was separated from its group a sequence of its own."""
        for subscriber in self._delivery.take_separated():
            if (resumed := subscriber.resumed) is not None:
                alone = replace(resumed, message=msgspec.structs.replace(resumed.message, may_share=False))
                self.submit(alone, subscriber.arrived_s)

    def _shorten_delayed(
        self, submission: Submission[Generate], candidate: Candidate, grammar: CompiledGrammar | None
    ) -> Sequence | None:
        """Shorten a sequence to the tokens of a resumed request that can only so join it; None if there is none.

        Only a delayed sequence can be shortened, and none is for a new request: its streams would wait until what
        they have received is computed again. A resumed request looks here first: a new one may have begun a sequence of
        its own, which would part the group.
        """
        key, presented = candidate.key, candidate.presented
        if key is None or not submission.message.admitted_ns or not self._open_requests.restart_grace:
            return None
        sequence = self._coalescer.find_longer(key, presented)
        if sequence is not None:
            sequence.shorten(submission.tokens, self._make_constraints(submission, grammar))
            self._coalescer.note_shortened(sequence, presented)
        return sequence

    def _join(self, sequence: Sequence, candidate: Candidate) -> None:
        subscriber, admitted_ns = candidate.subscriber, candidate.submission.message.admitted_ns
        if admitted_ns and sequence.order < 0:
            sequence.rank = min(sequence.rank, candidate.rank)
            sequence.admitted_ns = min(sequence.admitted_ns, admitted_ns)
            self._open_requests.restart_grace.note_resumed()
        subscriber.has_joined = True
        sequence.subscribe(subscriber)
        self._open_requests.add(sequence, subscriber)
        if (recorder := self._open_requests.recorder) is not None:
            recorder.note_join(sequence, subscriber)
        self._board.requests_coalesced += 1
        if sequence.order >= 0:  # one that is delayed may still be shortened; `admit_after_grace` replays it
            self._delivery.replay(sequence, subscriber)

    def _rank_of(self, message: PromptHeader, arrived_s: float) -> float:
        """The sequence's rank. A request that was admitted before keeps the arrival time of then."""
        step_s = self.limits.priority_step_s
        if not step_s:
            return 0.0
        first_arrived_s = min(arrived_s, message.admitted_ns / 1e9) if message.admitted_ns else arrived_s
        return first_arrived_s + message.priority * step_s

    def _finds_no_place(self, candidate: Candidate) -> bool:
        """Whether the request is new, and can neither join a sequence nor wait with one of its own."""
        message = candidate.submission.message
        return candidate.joinable is None and not message.admitted_ns and self._is_full_for(message)

    def _is_full_for(self, message: PromptHeader) -> bool:
        """Whether the wait queue has no place for a new sequence of this tenant.

        Sequences for which a slot is free do not wait long and do not count.
        """
        scheduler, restart_grace, limit = self._scheduler, self._open_requests.restart_grace, self.limits.max_waiting
        num_waiting = self._num_waiting()
        if num_waiting < limit:
            return False
        num_own = scheduler.num_waiting_of(message.tenant) + restart_grace.num_delayed_of(message.tenant)
        return not has_place(num_waiting, limit, num_own, scheduler.share_of(message.tenant, message.weight))

    def _overloaded(self, message: PromptHeader) -> Failure:
        return Failure(message.request_id, FailureCode.OVERLOADED, self.limits.max_waiting)

    def _num_waiting(self) -> int:
        """Sequences that wait, without those for which a slot is free."""
        return self._scheduler.num_waiting + len(self._open_requests.restart_grace) - self._scheduler.num_free_slots

    def _text_candidate(self, submission: Submission[TextHeader], arrived_s: float) -> Candidate | None:
        """None for a request that has all its tokens already; it has ended."""
        message = submission.message
        max_total_tokens = min(message.num_prompt_tokens + message.max_tokens, self.limits.max_context_tokens)
        subscriber = Subscriber.of(submission, arrived_s, max_total_tokens, frozenset(message.stop_token_ids))
        subscriber.num_logprobs = message.sampling.num_reported
        if subscriber.next_index >= max_total_tokens:
            self._board.requests_accepted += 1
            self._delivery.end(submission.frontend, submission.request_id, Finish.LENGTH)
            return None
        sampling = SamplingParams(**msgspec.structs.asdict(message.sampling))
        return self._candidate(submission, subscriber, sampling, ShareKey.of_request(submission, sampling))

    def _candidate(
        self,
        submission: Submission[PromptHeader],
        subscriber: Subscriber,
        sampling: SamplingParams,
        key: ShareKey | PooledKey | None,
    ) -> Candidate:
        presented = Presented(submission.frontend, submission.tokens, submission.message.num_prompt_tokens)
        joined = None if key is None else self._coalescer.find(key, presented)
        rank = self._rank_of(submission.message, subscriber.arrived_s)
        return Candidate(submission, subscriber, sampling, rank, key, presented, joined)

    def _make_constraints(
        self, submission: Submission[Generate], grammar: CompiledGrammar | None
    ) -> SequenceConstraints | None:
        """Constraints after the generated tokens that came with the request."""
        message = submission.message
        if message.constraints is None:
            return None
        stop_ids, tenant = frozenset(message.stop_token_ids), message.tenant
        backlog = memoryview(submission.tokens).cast("i")[message.num_prompt_tokens :].tolist()
        return SequenceConstraints(message.constraints, grammar, stop_ids, self.limits.vocab_size, backlog, tenant)

    def _reject_pool(self, submission: Submission[Pool], failure: Failure) -> None:
        if failure.code == FailureCode.OVERLOADED:
            self._refused_frontends.add(submission.frontend)
        self._reject(submission, failure)

    def _reject(self, submission: Submission[PromptHeader], failure: Failure) -> None:
        self._delivery.end(submission.frontend, submission.request_id, Finish.REJECTED, failure=failure)

    def _abandon(self, frontend: int, request_id: int) -> None:
        """Fail one request in the handler of an unexpected error, whatever was already done for it."""
        logger.exception("request %d of frontend %d fails: an error at intake", request_id, frontend)
        self._delivery.end(frontend, request_id, Finish.FAILED, failure=Failure(request_id, FailureCode.INTERNAL))
        if (found := self._open_requests.find(frontend, request_id)) is not None:
            self._open_requests.remove(*found)
        else:
            self._open_requests.remove_waiting(frontend, request_id)
            self._board.requests_accepted += 1
