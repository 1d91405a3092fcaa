"""Takes in submissions: refuses one, lets it wait for its grammar, or gives it a sequence."""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.backend.engine.coalescer import PooledKey, Presented, ShareKey
from penstock.backend.forward_pass import FROM_EMBEDDINGS, NO_ADAPTER, SamplingParams
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.subscribers import Subscriber
from penstock.backend.structured_output.constraints import SequenceConstraints
from penstock.process.admission import has_place, is_over_share
from penstock.shm.messages import Failure, FailureCode, Finish

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.engine.delivery import Delivery
    from penstock.backend.engine.limits import EngineLimits
    from penstock.backend.engine.lingering.streams import LingeringStreams
    from penstock.backend.engine.open_requests import OpenRequests
    from penstock.backend.engine.quoting.quoter import Quoter
    from penstock.backend.engine.vector_delivery import VectorDelivery
    from penstock.backend.scheduling.interface import ISequenceScheduler
    from penstock.backend.structured_output.compile_grammar import CompiledGrammar
    from penstock.shm.link.events import Submission
    from penstock.shm.memory.board import BackendBoard
    from penstock.shm.messages import Submit

logger = logging.getLogger("penstock.backend")

_EMBEDDED = np.int32(FROM_EMBEDDINGS).tobytes()
_SALT_BYTES = 16
_NO_SAMPLING = SamplingParams(temperature=0.0)
"""Used as the sampling of pooled requests, which sample nothing."""
_GRAMMAR_DRAIN_S = 1.0
"""After this much of a drain, requests that still wait for their grammar are refused."""


class Intake:
    """From a submission to a sequence. An error of ours in between fails this one request."""

    def __init__(
        self,
        scheduler: ISequenceScheduler,
        board: BackendBoard,
        limits: EngineLimits,
        open_requests: OpenRequests,
        delivery: Delivery,
        vector_delivery: VectorDelivery,
        lingering: LingeringStreams,
        clock: Callable[[], float],
        quoter: Quoter,
    ) -> None:
        self._quoter = quoter
        self._scheduler = scheduler
        self._board = board
        self.limits = limits
        self._open_requests = open_requests
        self._coalescer = open_requests.coalescer
        self._delivery = delivery
        self._vector_delivery = vector_delivery
        self._lingering = lingering
        self._clock = clock
        self.is_draining = False
        """New requests are refused."""
        self._refused_frontends: set[int] = set()
        """Frontends that wait for room: a full wait queue has refused pooled requests of theirs."""
        self._grammar_drain_ends_s: float | None = None
        """Set by the first turn of a drain."""

    def submit(self, submission: Submission, arrived_s: float | None = None, deadline_s: float | None = None) -> None:
        """Take in a request. arrived_s and deadline_s are given for one that is taken in again."""
        try:
            if arrived_s is None:
                arrived_s, timeout_ms = self._clock(), submission.submit.timeout_ms
                deadline_s = arrived_s + timeout_ms / 1000 if timeout_ms else None
            self._submit(submission, arrived_s, deadline_s)
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
                self.assign_sequence(submission, outcome, waiting.arrived_s, waiting.deadline_s)
            except Exception:  # noqa: BLE001 - as broad as in `submit`, for the same reason
                self._abandon(submission.frontend, submission.request_id)
        if self.is_draining:
            self._refuse_uncompiled()

    def _refuse_uncompiled(self) -> None:
        """Refuse requests that still wait for grammars, to end a drain: one may take its whole time limit."""
        now_s, grammar_queue = self._clock(), self._open_requests.grammar_queue
        if self._grammar_drain_ends_s is None:
            self._grammar_drain_ends_s = now_s + _GRAMMAR_DRAIN_S
        if now_s >= self._grammar_drain_ends_s:
            for submission in grammar_queue.take_all():
                self._reject(submission, Failure(submission.request_id, FailureCode.SHUTTING_DOWN))

    def _submit(self, submission: Submission, arrived_s: float, deadline_s: float | None) -> None:
        submit = submission.submit
        if submission.embeddings is not None:
            submission = replace(submission, tokens=_EMBEDDED * submit.num_prompt_tokens)
        if not self.is_draining and self._lingering.resume(submission):
            return
        if (refusal := self.find_refusal(submission)) is not None:
            self._reject(submission, refusal)
            return
        if self._vector_delivery.deliver_cached(submission):
            return
        grammar = None
        if submit.constraints is not None and submit.constraints.grammar is not None and submit.generates:
            grammar_queue = self._open_requests.grammar_queue
            compiled = grammar_queue.submit(submission, submit.constraints.grammar, arrived_s, deadline_s)
            if isinstance(compiled, Failure):
                self._reject(submission, compiled)
                return
            if compiled is None:  # continues in `submit_compiled`
                self._open_requests.deadlines.note(submission.frontend, submission.request_id, deadline_s)
                return
            grammar = compiled
        self.assign_sequence(submission, grammar, arrived_s, deadline_s)

    def find_refusal(self, submission: Submission) -> Failure | None:
        """Why the request cannot be taken in."""
        limits, submit = self.limits, submission.submit
        request_id = submit.request_id
        if self.is_draining:
            return Failure(request_id, FailureCode.SHUTTING_DOWN)
        if self._has_too_many_open(submit):
            max_open = limits.max_open_resumed if submit.admitted_ns else limits.max_open
            return Failure(request_id, FailureCode.OVERLOADED, max_open)
        if self._open_requests.is_open(submission.frontend, request_id):
            return Failure(request_id, FailureCode.INTERNAL)
        return limits.find_fault(submission) or self._lingering.find_refusal(submit)

    def _has_too_many_open(self, submit: Submit) -> bool:
        limits, num_open = self.limits, self._open_requests.num_open
        if submit.admitted_ns:
            return num_open >= limits.max_open_resumed
        if num_open < limits.max_open:
            return False
        return is_over_share(self._open_requests.num_open_of_each(), submit.tenant, limits.max_open)

    def assign_sequence(
        self, submission: Submission, grammar: CompiledGrammar | None, arrived_s: float, deadline_s: float | None
    ) -> None:
        """Join a valid request to an equal one's sequence, or start a new sequence. A full wait queue refuses it.

        grammar is this request's own copy, at its beginning.
        """
        submit = submission.submit
        subscriber = self._make_subscriber(submission, arrived_s, deadline_s)
        num_tokens = subscriber.next_index
        if submit.pooled is None and num_tokens >= subscriber.max_total_tokens:
            self._board.requests_accepted += 1
            self._delivery.end(submission.frontend, submission.request_id, Finish.LENGTH)
            return
        sampling = _NO_SAMPLING
        if submit.pooled is None:
            sampling = SamplingParams(**msgspec.structs.asdict(submit.sampling))
        key = _share_key(submission, sampling)
        rank = self._rank_of(submit, arrived_s)
        presented = Presented(submission.frontend, submission.tokens, submit.num_prompt_tokens)
        joined = None if key is None else self._coalescer.find(key, presented)
        if (decided := self._quoter.decide(submission, subscriber, sampling, rank, joined)) is not None:
            if submit.quote_only and joined is None and self._is_full_for(submit):
                self._reject(submission, self._overloaded(submit))
            else:
                self._delivery.end_with_quote(submission.frontend, *decided)
            return
        if key is not None and presented.num_tokens > presented.num_prompt_tokens:
            subscriber.resumed = submission
        if key is not None and self._join_group(key, presented, submission, subscriber, rank, grammar):
            return
        if not submit.admitted_ns and self._is_full_for(submit):
            self._reject(submission, self._overloaded(submit))
            return
        sequence = self._make_sequence(submission, subscriber, sampling, rank, grammar)
        if (key is not None or submit.linger is not None) and sampling.num_logprobs >= 0:
            sequence.kept_logprobs = []
        self._lingering.keep(submit, sequence, subscriber)
        self._open_requests.add(sequence, subscriber)
        if not self._open_requests.settlement.hold(sequence):
            self._scheduler.add(sequence)
        self._board.prompt_tokens += submit.num_prompt_tokens
        if key is not None:
            self._coalescer.offer(key, sequence, presented)

    def admit_settled(self) -> None:
        """Schedule sequences that came back from an earlier backend, once they are complete."""
        for sequence in self._open_requests.settlement.take_settled():
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
                alone = replace(resumed, submit=msgspec.structs.replace(resumed.submit, may_share=False))
                self.submit(alone, subscriber.arrived_s, subscriber.deadline_s)

    def _join_group(
        self,
        key: ShareKey | PooledKey,
        presented: Presented,
        submission: Submission,
        subscriber: Subscriber,
        rank: float,
        grammar: CompiledGrammar | None,
    ) -> bool:
        """Join an equal request's sequence, if there is one."""
        admitted_ns = submission.submit.admitted_ns
        sequence = None
        # Only a sequence that is held can be shortened, and none is for a new request: its streams would wait until
        # what they have received is computed again. A resumed request looks there first: a new one may have begun a
        # sequence of its own, which would part the group.
        if admitted_ns and self._open_requests.settlement:
            sequence = self._coalescer.find_longer(key, presented)
            if sequence is not None:
                sequence.shorten(submission.tokens, self._make_constraints(submission, grammar))
                self._coalescer.note_shortened(sequence, presented)
        sequence = sequence or self._coalescer.find(key, presented)
        # A sequence that waits behind a new request's rank would delay it.
        if sequence is None or (not admitted_ns and sequence.slot is None and rank < sequence.rank):
            return False
        if admitted_ns and sequence.order < 0:
            sequence.rank, sequence.admitted_ns = min(sequence.rank, rank), min(sequence.admitted_ns, admitted_ns)
            self._open_requests.settlement.note_resumed()
        self._lingering.keep(submission.submit, sequence, subscriber)
        self._join(sequence, subscriber)
        return True

    def _join(self, sequence: Sequence, subscriber: Subscriber) -> None:
        subscriber.has_joined = True
        sequence.subscribe(subscriber)
        self._open_requests.add(sequence, subscriber)
        if (recorder := self._open_requests.recorder) is not None:
            recorder.note_join(sequence, subscriber)
        self._board.requests_coalesced += 1
        if sequence.order >= 0:  # one that is held may still be shortened; `admit_settled` replays it
            self._delivery.replay(sequence, subscriber)

    def _rank_of(self, submit: Submit, arrived_s: float) -> float:
        """The sequence's rank. A request that was admitted before keeps the arrival time of then."""
        step_s = self.limits.priority_step_s
        if not step_s:
            return 0.0
        first_arrived_s = min(arrived_s, submit.admitted_ns / 1e9) if submit.admitted_ns else arrived_s
        return first_arrived_s + submit.priority * step_s

    def _is_full_for(self, submit: Submit) -> bool:
        """Whether the wait queue has no place for a new sequence of this tenant.

        Sequences for which a slot is free do not wait long and do not count.
        """
        scheduler, settlement, limit = self._scheduler, self._open_requests.settlement, self.limits.max_waiting
        num_waiting = self._num_waiting()
        if num_waiting < limit:
            return False
        num_own = scheduler.num_waiting_of(submit.tenant) + settlement.num_held_of(submit.tenant)
        return not has_place(num_waiting, limit, num_own, scheduler.share_of(submit.tenant, submit.weight))

    def _overloaded(self, submit: Submit) -> Failure:
        return Failure(submit.request_id, FailureCode.OVERLOADED, self.limits.max_waiting)

    def _num_waiting(self) -> int:
        """Sequences that wait, without those for which a slot is free."""
        return self._scheduler.num_waiting + len(self._open_requests.settlement) - self._scheduler.num_free_slots

    def _make_subscriber(self, submission: Submission, arrived_s: float, deadline_s: float | None) -> Subscriber:
        submit, num_tokens = submission.submit, len(submission.tokens) // 4
        max_total_tokens = num_tokens  # of a pooled request, which generates none
        if submit.pooled is None:
            max_total_tokens = min(submit.num_prompt_tokens + submit.max_tokens, self.limits.max_context_tokens)
        return Subscriber(
            submission.frontend,
            submit.request_id,
            max_total_tokens,
            frozenset(submit.stop_token_ids),
            num_tokens,
            arrived_s,
            deadline_s,
            submit.sampling.num_reported,
            tenant=submit.tenant,
            pooled=submit.pooled,
            reports_progress=submit.reports_progress,
        )

    def _make_sequence(
        self,
        submission: Submission,
        subscriber: Subscriber,
        sampling: SamplingParams,
        rank: float,
        grammar: CompiledGrammar | None,
    ) -> Sequence:
        submit = submission.submit
        sequence = Sequence(
            subscriber,
            submission.tokens,
            submit.num_prompt_tokens,
            sampling,
            # The cache cannot tell embeddings apart: with a random salt no other sequence finds their KV.
            salt=submit.own_salt if submission.embeddings is None else secrets.token_bytes(_SALT_BYTES),
            tenant=submit.tenant,
            weight=submit.weight,
            rank=rank,
            admitted_ns=submit.admitted_ns,
            constraints=self._make_constraints(submission, grammar),
        )
        sequence.adapter = self.limits.adapters.get(submit.adapter, NO_ADAPTER)
        sequence.embeddings, sequence.output = submission.embeddings, submission.output
        sequence.pooled = submit.pooled
        if submit.pooled is not None and submit.pooled.group:
            sequence.group = submission.frontend, submit.pooled.group
        sequence.num_prompt_logprobs = _num_prompt_logprobs(submission)
        return sequence

    def _make_constraints(self, submission: Submission, grammar: CompiledGrammar | None) -> SequenceConstraints | None:
        """Constraints after the generated tokens that came with the request."""
        submit = submission.submit
        if submit.constraints is None:
            return None
        stop_ids, tenant = frozenset(submit.stop_token_ids), submit.tenant
        backlog = memoryview(submission.tokens).cast("i")[submit.num_prompt_tokens :].tolist()
        return SequenceConstraints(submit.constraints, grammar, stop_ids, self.limits.vocab_size, backlog, tenant)

    def _reject(self, submission: Submission, failure: Failure) -> None:
        if failure.code == FailureCode.OVERLOADED and submission.submit.pooled is not None:
            self._refused_frontends.add(submission.frontend)
        self._delivery.end(submission.frontend, submission.request_id, Finish.REJECTED, failure=failure)

    def _abandon(self, frontend: int, request_id: int) -> None:
        """Fail one request in the handler of an unexpected error, whatever was already done for it."""
        logger.exception("request %d of frontend %d fails: an error at intake", request_id, frontend)
        self._delivery.end(frontend, request_id, Finish.FAILED, failure=Failure(request_id, FailureCode.INTERNAL))
        if (found := self._open_requests.find(frontend, request_id)) is not None:
            self._open_requests.remove(*found)
        else:
            self._open_requests.grammar_queue.remove(frontend, request_id)
            self._board.requests_accepted += 1


def _share_key(submission: Submission, sampling: SamplingParams) -> ShareKey | PooledKey | None:
    """None for a request that shares no sequence."""
    submit, pooled = submission.submit, submission.submit.pooled
    if not submit.may_share or _num_prompt_logprobs(submission) >= 0:
        return None
    prompt = submission.tokens[: 4 * submit.num_prompt_tokens]
    if pooled is not None:
        return PooledKey(submit.own_salt, prompt, pooled.kind, pooled.second_start)
    return ShareKey.of(submit.own_salt, prompt, sampling, submit.constraints, submit.stop_token_ids)


def _num_prompt_logprobs(submission: Submission) -> int:
    """-1 if none are due: the first token has none, and a resumed stream has received them all."""
    submit, num_tokens = submission.submit, len(submission.tokens) // 4
    return submit.num_prompt_logprobs if num_tokens == submit.num_prompt_tokens > 1 else -1
