"""The open requests of all frontends: from submission, through the tokens they get, to their one end."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from penstock.backend.engine.coalescer import Coalescer, ShareKey
from penstock.backend.engine.deadlines import Deadlines
from penstock.backend.forward_pass import FROM_EMBEDDINGS, SamplingParams
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.subscribers import Subscriber
from penstock.backend.structured_output.constraints import SequenceConstraints
from penstock.backend.structured_output.grammar_queue import GrammarQueue
from penstock.shm.messages import NO_TOKEN, Constraints, EventLogprobs, Failure, FailureCode, Finish, Started

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llguidance import LLMatcher

    from penstock.backend.scheduling.scheduler import Scheduler
    from penstock.backend.scheduling.step_plan import Plan
    from penstock.backend.structured_output.grammar_queue import WaitingSubmission
    from penstock.shm.link.backend_link import BackendLink
    from penstock.shm.link.events import Submission
    from penstock.shm.memory.board import BackendBoard
    from penstock.shm.messages import Submit


_EMBEDDED = np.int32(FROM_EMBEDDINGS).tobytes()
_SALT_BYTES = 16


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a single request may ask of this engine, and how many may wait."""

    vocab_size: int
    max_context_tokens: int
    max_waiting: int
    priority_step_s: float = 0.0
    """A request of the next lower priority number goes before those that came this much earlier; 0 is strict FIFO."""
    max_open: int = 1 << 16
    """Requests that may be open at once, those that listen to another's sequence among them."""


class Requests:
    """Owns subscribers by (frontend, request id), and with them the sequences they listen to."""

    def __init__(
        self,
        link: BackendLink,
        scheduler: Scheduler,
        board: BackendBoard,
        limits: EngineLimits,
        clock: Callable[[], float] = time.monotonic,
        *,
        grammar_queue: GrammarQueue | None = None,
    ) -> None:
        """Without a grammar queue, grammars are refused."""
        self._grammar_queue = grammar_queue or GrammarQueue(None, lambda: None, 0)
        self._link = link
        self._scheduler = scheduler
        self._board = board
        self._limits = limits
        self._clock = clock
        self._coalescer = Coalescer()
        self._open: dict[int, dict[int, tuple[Sequence, Subscriber]]] = {}
        self._deadlines = Deadlines(self._deadline_of)
        self._num_listening = 0
        self.is_draining = False

    @property
    def num_open(self) -> int:
        return self._num_listening + self._grammar_queue.num_waiting

    # Coming

    def compiled(self) -> list[tuple[WaitingSubmission, LLMatcher]]:
        """Requests that waited for their grammars and are to be taken on with them."""
        ready = []
        for waiting, outcome in self._grammar_queue.take_settled():
            if isinstance(outcome, Failure):
                self._reject(waiting.submission, outcome)
            else:
                ready.append((waiting, outcome))
        return ready

    def submit(self, submission: Submission) -> None:
        """A new request: refused, or waiting for its grammar, or taken on."""
        submit, now_s = submission.submit, self._clock()
        if submission.embeddings is not None:
            submission = replace(submission, tokens=_EMBEDDED * submit.num_prompt_tokens)
        if (failure := self._refusal(submission)) is not None:
            self._reject(submission, failure)
            return
        deadline_s = now_s + submit.timeout_ms / 1000 if submit.timeout_ms else None
        matcher = None
        if submit.constraints is not None and submit.constraints.grammar is not None:
            taken = self._grammar_queue.submit(submission, submit.constraints.grammar, now_s, deadline_s)
            if isinstance(taken, Failure):
                self._reject(submission, taken)
                return
            if taken is None:
                self._deadlines.note(submission.frontend, submission.request_id, deadline_s)
                return
            matcher = taken
        self.take_on(submission, matcher, now_s, deadline_s)

    def take_on(
        self, submission: Submission, matcher: LLMatcher | None, arrived_s: float, deadline_s: float | None
    ) -> None:
        """A request that is sound listens to a sequence in flight, or to one of its own; a full queue refuses it.
        matcher is of its grammar, at the beginning.
        """
        submit = submission.submit
        subscriber = self._subscriber(submission, arrived_s, deadline_s)
        num_tokens = subscriber.next_index
        if num_tokens >= subscriber.max_total_tokens:
            self._board.requests_accepted += 1
            self._end(subscriber, NO_TOKEN, Finish.LENGTH)
            return
        sampling = _sampling_of(submit, subscriber)
        key = None
        if submit.may_share and not subscriber.is_scored:
            prompt = submission.tokens[: 4 * submit.num_prompt_tokens]
            key = ShareKey.of(submit.salt, prompt, sampling, submit.constraints, submit.stop_token_ids)
        step_s = self._limits.priority_step_s
        rank = arrived_s + submit.priority * step_s if step_s else 0.0
        twin = self._coalescer.find(key) if key is not None else None
        # One that waits behind others that this request is to go before is not joined.
        if twin is not None and (twin.slot is not None or rank >= twin.rank):
            self._join(twin, subscriber)
            return
        if self._is_full(num_tokens > submit.num_prompt_tokens):
            self._reject(submission, Failure(submit.request_id, FailureCode.OVERLOADED, self._limits.max_waiting))
            return
        sequence = self._new_sequence(submission, subscriber, sampling, rank, matcher)
        # Tokens that a frontend brings along are its own word: nobody else is to be told them.
        is_offered = key is not None and num_tokens == submit.num_prompt_tokens
        if is_offered and sampling.num_logprobs >= 0:
            sequence.kept_logprobs = []
        self._open_for(subscriber, sequence)
        self._scheduler.add(sequence)
        self._board.prompt_tokens += submit.num_prompt_tokens
        if key is not None and is_offered:
            self._coalescer.offer(key, sequence)

    def _subscriber(self, submission: Submission, arrived_s: float, deadline_s: float | None) -> Subscriber:
        submit, num_tokens = submission.submit, len(submission.tokens) // 4
        return Subscriber(
            submission.frontend,
            submit.request_id,
            min(submit.num_prompt_tokens + submit.max_tokens, self._limits.max_context_tokens),
            frozenset(submit.stop_token_ids),
            num_tokens,
            arrived_s,
            deadline_s,
            submit.sampling.num_logprobs,
            # A stream that goes on after a backend's death has been told them.
            submit.num_prompt_logprobs if num_tokens == submit.num_prompt_tokens > 1 else -1,
        )

    def _new_sequence(
        self,
        submission: Submission,
        subscriber: Subscriber,
        sampling: SamplingParams,
        rank: float,
        matcher: LLMatcher | None,
    ) -> Sequence:
        """Raises ConstraintFailed, as `_constraints`."""
        submit, is_scored = submission.submit, subscriber.is_scored
        sequence = Sequence(
            subscriber,
            submission.tokens[:4] if is_scored else submission.tokens,
            1 if is_scored else submit.num_prompt_tokens,
            sampling,
            # What embeddings stand for is not known: nobody else is to find what is computed of them.
            salt=submit.salt if submission.embeddings is None else secrets.token_bytes(_SALT_BYTES),
            rank=rank,
            constraints=self._constraints(submission, matcher, is_scored=is_scored),
        )
        sequence.embeddings = submission.embeddings
        sequence.output, sequence.output_start = submission.output, submit.num_prompt_tokens
        return sequence

    def _join(self, sequence: Sequence, subscriber: Subscriber) -> None:
        """Of an equal request, in flight."""
        subscriber.has_joined = True
        sequence.subscribe(subscriber)
        self._open_for(subscriber, sequence)
        self._board.requests_coalesced += 1
        self._replay(sequence, subscriber)

    def _open_for(self, subscriber: Subscriber, sequence: Sequence) -> None:
        """From now on `_leave` undoes whatever was done for the request: nothing of it can be left without an owner."""
        self._open.setdefault(subscriber.frontend, {})[subscriber.request_id] = sequence, subscriber
        self._num_listening += 1
        self._board.requests_accepted += 1
        self._deadlines.note(subscriber.frontend, subscriber.request_id, subscriber.deadline_s)

    def _refusal(self, submission: Submission) -> Failure | None:
        """Frontends check all this for the sake of the message; here it is checked for the sake of the engine."""
        limits, submit = self._limits, submission.submit
        tokens = np.frombuffer(submission.tokens, np.int32)
        request_id = submit.request_id
        if self.is_draining:
            return Failure(request_id, FailureCode.SHUTTING_DOWN)
        if self.num_open >= limits.max_open:
            return Failure(request_id, FailureCode.OVERLOADED, limits.max_open)
        if request_id in self._open.get(submission.frontend, {}) or self._grammar_queue.find(
            submission.frontend, request_id
        ):
            return Failure(request_id, FailureCode.INTERNAL)
        if not 1 <= submit.num_prompt_tokens <= len(tokens) or len(tokens) > limits.max_context_tokens:
            return Failure(request_id, FailureCode.CONTEXT_TOO_LONG, limits.max_context_tokens)
        lowest = 0 if submission.embeddings is None else FROM_EMBEDDINGS
        if tokens.min() < lowest or max(int(tokens.max()), *_named_ids(submit), 0) >= limits.vocab_size:
            return Failure(request_id, FailureCode.BAD_TOKEN, limits.vocab_size)
        return None

    def _constraints(
        self, submission: Submission, matcher: LLMatcher | None, *, is_scored: bool
    ) -> SequenceConstraints | None:
        """A prompt that is scored is generated, all but its first token: each is forced, and what the model thought of
        it comes out as that of any token does. Raises ConstraintFailed for brought-along tokens that the grammar does
        not allow.
        """
        submit, tokens = submission.submit, memoryview(submission.tokens).cast("i")
        wanted, stop_ids = submit.constraints, frozenset(submit.stop_token_ids)
        if is_scored:
            wanted = wanted or Constraints()
            return SequenceConstraints(wanted, matcher, stop_ids, self._limits.vocab_size, tokens[1:].tolist())
        if wanted is None:
            return None
        constraints = SequenceConstraints(wanted, matcher, stop_ids, self._limits.vocab_size)
        for token_id in tokens[submit.num_prompt_tokens :]:
            constraints.advance(token_id)
        return constraints

    def _is_full(self, is_resumed: bool) -> bool:
        """Whether a new sequence finds no place in the queue.

        Those that a free slot awaits do not wait for long. A stream that goes on after a backend's death was admitted
        once: it finds room even if newcomers were quicker, as much as there can have been such streams.
        """
        room = self._scheduler.max_running if is_resumed else self._scheduler.num_free_slots
        return self._scheduler.num_waiting >= self._limits.max_waiting + room

    def _reject(self, submission: Submission, failure: Failure) -> None:
        self._link.push(submission.frontend, failure.request_id, NO_TOKEN, Finish.REJECTED, failure=failure)
        self._board.requests_rejected += 1

    def _replay(self, sequence: Sequence, subscriber: Subscriber) -> None:
        """All tokens so far at once, for one who came late; its own limit may lie among them."""
        for index in range(subscriber.next_index, len(sequence.tokens)):
            # Of all that were generated here the last stands last.
            told = sequence.kept_logprobs[index - len(sequence.tokens)] if sequence.kept_logprobs else None
            if self._give(sequence, subscriber, index, sequence.tokens[index], told):
                self._leave(sequence, subscriber)
                return

    # Getting tokens

    def deliver_fast_path(self, plan: Plan, token_ids: list[int]) -> list[int]:
        """Tells a step's tokens, one for each row, to those for whom they are a token and nothing else.

        Returns the indices of the other rows, which are untouched: stale, without a token, or with one that completes a
        page, begins a stream or may end one.
        """
        special = []
        outputs: defaultdict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        rows = zip(range(len(plan)), plan.sequences, plan.generations, plan.ends, token_ids, strict=True)
        for index, sequence, generation, end, token_id in rows:
            if (
                end < sequence.fast_path_until
                and sequence.generation == generation
                and token_id not in sequence.stop_ids
            ):
                sequence.tokens.append(token_id)
                for frontend, request_id in sequence.subscriber_ids:
                    request_ids, tokens = outputs[frontend]
                    request_ids.append(request_id)
                    tokens.append(token_id)
            else:
                special.append(index)
        for frontend, (request_ids, tokens) in outputs.items():
            self._link.push_tokens(frontend, request_ids, tokens)
        return special

    def deliver(self, sequence: Sequence, token_id: int, logprobs: EventLogprobs | None = None) -> None:
        """The sequence's next token, to all who listen; those it ends leave, and with the last the sequence."""
        index = len(sequence.tokens)
        sequence.tokens.append(token_id)
        if sequence.kept_logprobs is not None and logprobs is not None:
            sequence.kept_logprobs.append(logprobs)
        for subscriber in tuple(sequence.subscribers):
            if self._give(sequence, subscriber, index, token_id, logprobs):
                self._leave(sequence, subscriber)
        sequence.settle()

    def _give(
        self, sequence: Sequence, subscriber: Subscriber, index: int, token_id: int, told: EventLogprobs | None
    ) -> bool:
        """True where this token ends the subscriber's stream."""
        if index < subscriber.next_index:  # it brought this token along
            if told is not None and subscriber.num_prompt_logprobs >= 0:
                entry = _narrowed(told, index, subscriber.num_prompt_logprobs)
                self._link.push_prompt_logprobs(subscriber.frontend, subscriber.request_id, entry)
            return False
        logprobs = None
        if told is not None and subscriber.num_logprobs >= 0:
            logprobs = _narrowed(told, 0, subscriber.num_logprobs)
        started = None
        if not subscriber.is_started:
            subscriber.is_started = True
            queue_s = 0.0 if subscriber.has_joined or sequence.queue_s is None else sequence.queue_s
            # After a preemption, generated tokens may have been found in the cache as well.
            num_cached = min(sequence.kv.num_cached, sequence.num_prompt_tokens)
            started = Started(subscriber.request_id, num_cached, queue_s, subscriber.has_joined)
            if not subscriber.has_joined:
                self._board.cached_tokens += num_cached
        if token_id in subscriber.stop_token_ids:
            self._end(subscriber, token_id, Finish.STOP, started=started, logprobs=logprobs)
        elif index + 1 >= subscriber.max_total_tokens:
            self._end(subscriber, token_id, Finish.LENGTH, started=started, logprobs=logprobs)
        else:
            self._link.push(subscriber.frontend, subscriber.request_id, token_id, started=started, logprobs=logprobs)
            return False
        return True

    def note_preemption(self, sequence: Sequence) -> None:
        for subscriber in sequence.subscribers:
            self._link.note_preemption(subscriber.frontend, subscriber.request_id)

    # Leaving

    def cancel(self, frontend: int, request_id: int, noticed_ns: int = 0) -> None:
        """Unknown ids are normal: a cancel crosses the end of its request, and may come twice.

        noticed_ns, CLOCK_MONOTONIC, is when the frontend noticed; 0 is unknown.
        """
        if self._grammar_queue.remove(frontend, request_id):
            self._board.requests_accepted += 1
            self._board.requests_cancelled += 1
        elif (found := self._open.get(frontend, {}).get(request_id)) is not None:
            self._leave(*found)
            self._board.requests_cancelled += 1
            if noticed_ns and found[0].ended:
                self._board.observe_cancel(max(0, time.monotonic_ns() - noticed_ns) // 1000)

    def drop_frontend(self, frontend: int) -> None:
        num_forgotten = self._grammar_queue.remove_frontend(frontend)
        self._board.requests_accepted += num_forgotten
        self._board.requests_cancelled += num_forgotten
        for sequence, subscriber in list(self._open.get(frontend, {}).values()):
            self._leave(sequence, subscriber)
            self._board.requests_cancelled += 1

    def expire(self) -> None:
        """Ends the requests whose deadline has passed, wherever they are."""
        for frontend, request_id in self._deadlines.passed(self._clock()):
            if (found := self._open.get(frontend, {}).get(request_id)) is not None:
                self._end(found[1], NO_TOKEN, Finish.EXPIRED)
                self._leave(*found)
            else:
                self._grammar_queue.remove(frontend, request_id)
                self._link.push(frontend, request_id, NO_TOKEN, Finish.EXPIRED)
                self._board.requests_accepted += 1
                self._board.requests_expired += 1

    def _deadline_of(self, frontend: int, request_id: int) -> float | None:
        if (found := self._open.get(frontend, {}).get(request_id)) is not None:
            return found[1].deadline_s
        waiting = self._grammar_queue.find(frontend, request_id)
        return waiting.deadline_s if waiting is not None else None

    def next_due_s(self, at_most_s: float) -> float:
        """Seconds until the next deadline."""
        return self._deadlines.next_due_s(self._clock(), at_most_s)

    def fail(self, sequence: Sequence, code: FailureCode = FailureCode.INTERNAL, text: str = "") -> None:
        """A fault of ours, or of its constraints: all who listen to the sequence are told, and it ends."""
        for subscriber in list(sequence.subscribers):
            failure = Failure(subscriber.request_id, code, text=text)
            self._end(subscriber, NO_TOKEN, Finish.FAILED, failure=failure)
            self._leave(sequence, subscriber)

    def abandon(self, frontend: int, request_id: int) -> None:
        """A fault of ours in taking a request on: it fails alone."""
        failure = Failure(request_id, FailureCode.INTERNAL)
        self._link.push(frontend, request_id, NO_TOKEN, Finish.FAILED, failure=failure)
        self._board.requests_failed += 1
        if (found := self._open.get(frontend, {}).get(request_id)) is not None:
            self._leave(*found)
        else:
            self._board.requests_accepted += 1

    def _end(
        self,
        subscriber: Subscriber,
        token_id: int,
        finish: Finish,
        started: Started | None = None,
        failure: Failure | None = None,
        logprobs: EventLogprobs | None = None,
    ) -> None:
        self._link.push(
            subscriber.frontend,
            subscriber.request_id,
            token_id,
            finish,
            started=started,
            failure=failure,
            logprobs=logprobs,
        )
        if finish in (Finish.STOP, Finish.LENGTH):
            self._board.requests_finished += 1
        elif finish is Finish.EXPIRED:
            self._board.requests_expired += 1
        else:
            self._board.requests_failed += 1

    def _leave(self, sequence: Sequence, subscriber: Subscriber) -> None:
        """The subscriber is gone; the last one takes the sequence with it."""
        del self._open[subscriber.frontend][subscriber.request_id]
        if not self._open[subscriber.frontend]:
            del self._open[subscriber.frontend]
        self._num_listening -= 1
        sequence.unsubscribe(subscriber)
        if not sequence.subscribers:
            self._coalescer.withdraw(sequence)
            self._scheduler.remove(sequence)

    def check_integrity(self, num_scheduled: int) -> None:
        """Raises RuntimeError unless each open request listens to one sequence, and each of num_scheduled is heard."""
        pairs = [pair for by_id in self._open.values() for pair in by_id.values()]
        sequences = {sequence for sequence, _ in pairs}
        if len(pairs) != self._num_listening or any(
            subscriber not in sequence.subscribers for sequence, subscriber in pairs
        ):
            raise RuntimeError(f"{self._num_listening} requests are counted open, {len(pairs)} are")
        if sum(len(sequence.subscribers) for sequence in sequences) != len(pairs):
            raise RuntimeError("a sequence has a listener that is no open request")
        if num_scheduled != len(sequences) or any(sequence.ended for sequence in sequences):
            raise RuntimeError(f"{num_scheduled} sequences are scheduled, {len(sequences)} have listeners")
        if len(self._coalescer) > len(sequences):
            raise RuntimeError("a sequence that has ended can still be joined")


def _sampling_of(submit: Submit, subscriber: Subscriber) -> SamplingParams:
    """What a prompt's tokens are told of is told of all of them."""
    sampling = SamplingParams(**msgspec.structs.asdict(submit.sampling))
    if not subscriber.is_scored:
        return sampling
    return replace(sampling, num_logprobs=max(subscriber.num_logprobs, subscriber.num_prompt_logprobs))


def _narrowed(told: EventLogprobs, event: int, width: int) -> EventLogprobs:
    return EventLogprobs(event, told.logprob, told.rank, told.top_ids[:width], told.top_logprobs[:width])


def _named_ids(submit: Submit) -> Iterator[int]:
    """Token ids that a request names besides its tokens; stop ids never meet a token that is not there."""
    yield from (token_id for token_id, _ in submit.sampling.logit_bias)
    if (constraints := submit.constraints) is not None:
        yield from constraints.allowed_token_ids
        yield from constraints.thinking_end
        yield from (token_id for run in constraints.bad_words for token_id in run)
