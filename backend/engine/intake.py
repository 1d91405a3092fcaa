"""Takes in submissions: refuses one, lets it wait for its grammar, or gives it a sequence."""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.backend.engine.coalescer import ShareKey
from penstock.backend.forward_pass import FROM_EMBEDDINGS, SamplingParams
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.subscribers import Subscriber
from penstock.backend.structured_output.constraints import SequenceConstraints
from penstock.shm.messages import Constraints, Failure, FailureCode, Finish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llguidance import LLMatcher

    from penstock.backend.engine.delivery import Delivery
    from penstock.backend.engine.open_requests import OpenRequests
    from penstock.backend.scheduling.scheduler import Scheduler
    from penstock.shm.link.events import Submission
    from penstock.shm.memory.board import BackendBoard
    from penstock.shm.messages import Submit

logger = logging.getLogger("penstock.backend")

_EMBEDDED = np.int32(FROM_EMBEDDINGS).tobytes()
_SALT_BYTES = 16


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of one request, and of the number of open and waiting requests."""

    vocab_size: int
    max_context_tokens: int
    max_waiting: int
    priority_step_s: float = 0.0
    """Head start of one priority level over later arrivals; 0 is first come, first served."""
    max_open: int = 1 << 16
    """Open requests, including those that share a sequence."""


class Intake:
    """From a submission to a sequence. An error of ours in between fails this one request."""

    def __init__(
        self,
        scheduler: Scheduler,
        board: BackendBoard,
        limits: EngineLimits,
        open_requests: OpenRequests,
        delivery: Delivery,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._board = board
        self.limits = limits
        self._open_requests = open_requests
        self._coalescer = open_requests.coalescer
        self._delivery = delivery
        self._clock = clock
        self.is_draining = False
        """New requests are refused."""

    def submit(self, submission: Submission) -> None:
        """Take in a new request."""
        try:
            self._submit(submission)
        except Exception:  # noqa: BLE001 - logged by _abandon; the other requests go on
            self._abandon(submission)

    def submit_compiled(self) -> None:
        """Take in the requests whose grammar has been compiled since the last call."""
        for waiting, outcome in self._open_requests.grammar_queue.take_settled():
            submission = waiting.submission
            if isinstance(outcome, Failure):
                self._reject(submission, outcome)
                continue
            try:
                self.assign_sequence(submission, outcome, waiting.arrived_s, waiting.deadline_s)
            except Exception:  # noqa: BLE001 - as in `submit`
                self._abandon(submission)

    def _submit(self, submission: Submission) -> None:
        submit, now_s = submission.submit, self._clock()
        if submission.embeddings is not None:
            submission = replace(submission, tokens=_EMBEDDED * submit.num_prompt_tokens)
        if (refusal := self.find_refusal(submission)) is not None:
            self._reject(submission, refusal)
            return
        deadline_s = now_s + submit.timeout_ms / 1000 if submit.timeout_ms else None
        matcher = None
        if submit.constraints is not None and submit.constraints.grammar is not None:
            grammar_queue = self._open_requests.grammar_queue
            compiled = grammar_queue.submit(submission, submit.constraints.grammar, now_s, deadline_s)
            if isinstance(compiled, Failure):
                self._reject(submission, compiled)
                return
            if compiled is None:  # continues in `submit_compiled`
                self._open_requests.deadlines.note(submission.frontend, submission.request_id, deadline_s)
                return
            matcher = compiled
        self.assign_sequence(submission, matcher, now_s, deadline_s)

    def find_refusal(self, submission: Submission) -> Failure | None:
        """Why the request cannot be taken in. Frontends check the same for a better message; these checks protect the
        engine."""
        limits, submit = self.limits, submission.submit
        tokens = np.frombuffer(submission.tokens, np.int32)
        request_id = submit.request_id
        if self.is_draining:
            return Failure(request_id, FailureCode.SHUTTING_DOWN)
        if self._open_requests.num_open >= limits.max_open:
            return Failure(request_id, FailureCode.OVERLOADED, limits.max_open)
        if self._open_requests.is_open(submission.frontend, request_id):
            return Failure(request_id, FailureCode.INTERNAL)
        if not 1 <= submit.num_prompt_tokens <= len(tokens) or len(tokens) > limits.max_context_tokens:
            return Failure(request_id, FailureCode.CONTEXT_TOO_LONG, limits.max_context_tokens)
        lowest = 0 if submission.embeddings is None else FROM_EMBEDDINGS
        if tokens.min() < lowest or max(int(tokens.max()), *_named_ids(submit), 0) >= limits.vocab_size:
            return Failure(request_id, FailureCode.BAD_TOKEN, limits.vocab_size)
        return None

    def assign_sequence(
        self, submission: Submission, matcher: LLMatcher | None, arrived_s: float, deadline_s: float | None
    ) -> None:
        """Join a valid request to an equal one's sequence, or start a new sequence. A full wait queue refuses it.

        matcher is the grammar's, in its initial state.
        """
        submit = submission.submit
        subscriber = self._make_subscriber(submission, arrived_s, deadline_s)
        num_tokens = subscriber.next_index
        if num_tokens >= subscriber.max_total_tokens:
            self._board.requests_accepted += 1
            self._delivery.end(submission.frontend, submission.request_id, Finish.LENGTH)
            return
        sampling = _make_sampling(submit, subscriber)
        key = None
        if submit.may_share and not subscriber.is_scored:
            prompt = submission.tokens[: 4 * submit.num_prompt_tokens]
            key = ShareKey.of(submit.salt, prompt, sampling, submit.constraints, submit.stop_token_ids)
        step_s = self.limits.priority_step_s
        rank = arrived_s + submit.priority * step_s if step_s else 0.0
        match = self._coalescer.find(key) if key is not None else None
        # A sequence that waits behind this request's rank would delay it.
        if match is not None and (match.slot is not None or rank >= match.rank):
            self._join(match, subscriber)
            return
        if self._is_full(is_resumed=num_tokens > submit.num_prompt_tokens):
            self._reject(submission, Failure(submit.request_id, FailureCode.OVERLOADED, self.limits.max_waiting))
            return
        sequence = self._make_sequence(submission, subscriber, sampling, rank, matcher)
        # Generated tokens that came with the request are that frontend's claim. No other request may receive them.
        may_be_joined = key is not None and num_tokens == submit.num_prompt_tokens
        if may_be_joined and sampling.num_logprobs >= 0:
            sequence.kept_logprobs = []
        self._open_requests.add(sequence, subscriber)
        self._scheduler.add(sequence)
        self._board.prompt_tokens += submit.num_prompt_tokens
        if key is not None and may_be_joined:
            self._coalescer.offer(key, sequence)

    def _join(self, sequence: Sequence, subscriber: Subscriber) -> None:
        subscriber.has_joined = True
        sequence.subscribe(subscriber)
        self._open_requests.add(sequence, subscriber)
        self._board.requests_coalesced += 1
        self._delivery.replay(sequence, subscriber)

    def _is_full(self, *, is_resumed: bool) -> bool:
        """Whether the wait queue has no place for a new sequence.

        Sequences for which a slot is free do not wait long and do not count. A stream that is resumed after a backend
        restart was admitted before: max_running more places are kept for such streams.
        """
        extra = self._scheduler.max_running if is_resumed else self._scheduler.num_free_slots
        return self._scheduler.num_waiting >= self.limits.max_waiting + extra

    def _make_subscriber(self, submission: Submission, arrived_s: float, deadline_s: float | None) -> Subscriber:
        submit, num_tokens = submission.submit, len(submission.tokens) // 4
        return Subscriber(
            submission.frontend,
            submit.request_id,
            min(submit.num_prompt_tokens + submit.max_tokens, self.limits.max_context_tokens),
            frozenset(submit.stop_token_ids),
            num_tokens,
            arrived_s,
            deadline_s,
            submit.sampling.num_logprobs,
            # A resumed stream has received them before.
            submit.num_prompt_logprobs if num_tokens == submit.num_prompt_tokens > 1 else -1,
        )

    def _make_sequence(
        self,
        submission: Submission,
        subscriber: Subscriber,
        sampling: SamplingParams,
        rank: float,
        matcher: LLMatcher | None,
    ) -> Sequence:
        """Raises ConstraintFailed, see `_make_constraints`."""
        submit, is_scored = submission.submit, subscriber.is_scored
        sequence = Sequence(
            subscriber,
            submission.tokens[:4] if is_scored else submission.tokens,
            1 if is_scored else submit.num_prompt_tokens,
            sampling,
            # The cache cannot tell embeddings apart: with a random salt no other sequence finds their KV.
            salt=submit.salt if submission.embeddings is None else secrets.token_bytes(_SALT_BYTES),
            rank=rank,
            constraints=self._make_constraints(submission, matcher, is_scored=is_scored),
        )
        sequence.embeddings = submission.embeddings
        sequence.output, sequence.output_start = submission.output, submit.num_prompt_tokens
        return sequence

    def _make_constraints(
        self, submission: Submission, matcher: LLMatcher | None, *, is_scored: bool
    ) -> SequenceConstraints | None:
        """Constraints after the generated tokens that came with the request.

        A scored prompt is generated, all but its first token: each token is forced, and its log probabilities are those
        of any generated token. Raises ConstraintFailed for given tokens that the grammar does not allow.
        """
        submit, tokens = submission.submit, memoryview(submission.tokens).cast("i")
        requested, stop_ids = submit.constraints, frozenset(submit.stop_token_ids)
        if is_scored:
            requested = requested or Constraints()
            return SequenceConstraints(requested, matcher, stop_ids, self.limits.vocab_size, tokens[1:].tolist())
        if requested is None:
            return None
        constraints = SequenceConstraints(requested, matcher, stop_ids, self.limits.vocab_size)
        for token_id in tokens[submit.num_prompt_tokens :]:
            constraints.advance(token_id)
        return constraints

    def _reject(self, submission: Submission, failure: Failure) -> None:
        self._delivery.end(submission.frontend, submission.request_id, Finish.REJECTED, failure=failure)

    def _abandon(self, submission: Submission) -> None:
        """Fail one request in the handler of an unexpected error, whatever was already done for it."""
        frontend, request_id = submission.frontend, submission.request_id
        logger.exception("request %d of frontend %d fails: an error at intake", request_id, frontend)
        self._delivery.end(frontend, request_id, Finish.FAILED, failure=Failure(request_id, FailureCode.INTERNAL))
        if (found := self._open_requests.find(frontend, request_id)) is not None:
            self._open_requests.remove(*found)
        else:
            self._board.requests_accepted += 1


def _make_sampling(submit: Submit, subscriber: Subscriber) -> SamplingParams:
    """Prompt and output of a scored request share the larger number of log probabilities."""
    sampling = SamplingParams(**msgspec.structs.asdict(submit.sampling))
    if not subscriber.is_scored:
        return sampling
    return replace(sampling, num_logprobs=max(subscriber.num_logprobs, subscriber.num_prompt_logprobs))


def _named_ids(submit: Submit) -> Iterator[int]:
    """Token ids in the request's options. Stop ids are left out: one outside the vocabulary is never sampled."""
    yield from (token_id for token_id, _ in submit.sampling.logit_bias)
    if (constraints := submit.constraints) is not None:
        yield from constraints.allowed_token_ids
        yield from constraints.thinking_end
        yield from (token_id for run in constraints.bad_words for token_id in run)
