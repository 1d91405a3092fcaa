"""Sends each sampled token to the sequence's subscribers, and ends the streams that are complete or have failed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

import msgspec

from penstock.backend.engine.interfaces import IEngineLink
from penstock.backend.engine.quoting.history import QuoteErrors
from penstock.backend.engine.requests.request_table import RequestTable
from penstock.backend.scheduling.step_plan import Plan
from penstock.backend.sequences.resumable_stream import ResumableChoice
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.subscribers import Subscriber
from penstock.shm.memory.board import BackendBoard
from penstock.shm.messages import (
    NO_TOKEN,
    EventLogprobs,
    Failure,
    FailureCode,
    Finish,
    Generate,
    Progress,
    Quote,
    Started,
)


class Delivery:
    """Sends tokens. Those that are only a token to every subscriber take the fast path, all together; see
    `Sequence.update_fast_path`."""

    def __init__(
        self,
        link: IEngineLink,
        board: BackendBoard,
        open_requests: RequestTable,
        quote_errors: QuoteErrors | None = None,
    ) -> None:
        """quote_errors learns from the answers; None if nothing is quoted."""
        self._quote_errors = quote_errors
        self._link = link
        self._board = board
        self._open_requests = open_requests
        self._separated: list[Subscriber] = []

    def deliver_fast_path(self, plan: Plan, token_ids: list[int], accepted: Collection[int] = ()) -> list[int]:
        """Deliver the tokens of a step, one per row, that need the fast path only.

        Returns the indices of the other rows, which are untouched: stale rows, rows without a token, those in accepted,
        which have several, and rows whose token completes a page, starts a stream or may end one.
        """
        slow = []
        outputs: defaultdict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        rows = zip(range(len(plan)), plan.sequences, plan.generations, plan.ends, token_ids, strict=True)
        for index, sequence, generation, end, token_id in rows:
            if (
                end < sequence.fast_path_until
                and sequence.generation == generation
                and token_id not in sequence.stop_ids
                and index not in accepted
            ):
                sequence.tokens.append(token_id)
                for frontend, request_id in sequence.subscriber_ids:
                    request_ids, tokens = outputs[frontend]
                    request_ids.append(request_id)
                    tokens.append(token_id)
            else:
                slow.append(index)
        for frontend, (request_ids, tokens) in outputs.items():
            self._link.push_tokens(frontend, request_ids, tokens)
        return slow

    def deliver(self, sequence: Sequence, token_id: int, logprobs: EventLogprobs | None = None) -> None:
        """Deliver the sequence's next token. Subscribers that it ends leave; with the last one the sequence ends."""
        index = len(sequence.tokens)
        sequence.tokens.append(token_id)
        if sequence.past_logprobs is not None and logprobs is not None:
            sequence.past_logprobs.append(logprobs)
        for subscriber in tuple(sequence.subscribers):
            if subscriber.contradicts(index, token_id):
                self._separate(sequence, subscriber)
            elif self._send(sequence, subscriber, index, token_id, logprobs):
                self._open_requests.remove(sequence, subscriber)
        sequence.update_fast_path()

    def deliver_scored(self, sequence: Sequence, entries: list[EventLogprobs]) -> None:
        """Deliver log probabilities of the next tokens of the prompt; the event of each is its index."""
        for subscriber in sequence.subscribers:  # at most one: such a sequence is not shared
            for entry in entries:
                self._link.push_prompt_logprobs(subscriber.frontend, subscriber.request_id, entry)
        sequence.num_scored = entries[-1].event

    def report_progress(self, sequence: Sequence, num_computed: int, now_s: float) -> None:
        """Tell the subscribers that ask for it how much of the prompt is computed."""
        for subscriber in sequence.subscribers:
            if subscriber.reports_progress and not subscriber.is_started:
                spent_s = max(0.0, now_s - subscriber.arrived_s - (sequence.queue_s or 0.0))
                num_known = min(num_computed, sequence.num_prompt_tokens)
                num_cached = min(sequence.kv.num_cached, num_known)
                progress = Progress(subscriber.request_id, num_cached, num_known, spent_s)
                self._link.push(subscriber.frontend, subscriber.request_id, NO_TOKEN, progress=progress)

    def _separate(self, sequence: Sequence, subscriber: Subscriber) -> None:
        """Take a resumed request out of a sequence that does not continue its stream.

        Either its frontend's claim is false, or the tokens depend on the batch. It needs a sequence of its own.
        """
        self._open_requests.remove(sequence, subscriber)
        self._board.requests_accepted -= 1  # it is taken in again
        self._separated.append(subscriber)

    def take_separated(self) -> list[Subscriber]:
        """Remove and return the resumed requests that have lost their sequence since the last call."""
        separated, self._separated = self._separated, []
        return separated

    def replay(self, sequence: Sequence, subscriber: Subscriber) -> None:
        """Send a late joiner all tokens so far. Its own limit may be among them."""
        for index in range(subscriber.next_index, len(sequence.tokens)):
            # past_logprobs is aligned with the end of tokens.
            logprobs = sequence.past_logprobs[index - len(sequence.tokens)] if sequence.past_logprobs else None
            if self._send(sequence, subscriber, index, sequence.tokens[index], logprobs):
                self._open_requests.remove(sequence, subscriber)
                return

    def _send(
        self, sequence: Sequence, subscriber: Subscriber, index: int, token_id: int, logprobs: EventLogprobs | None
    ) -> bool:
        """Send one subscriber the sequence's token at index. True if that ends its stream."""
        if index < subscriber.next_index:  # a token that came with the request
            return False
        own_logprobs = None
        if logprobs is not None and subscriber.num_logprobs >= 0:
            own_logprobs = _narrowed(logprobs, 0, subscriber.num_logprobs)
        started = None if subscriber.is_started else self.start(sequence, subscriber)
        frontend, request_id = subscriber.frontend, subscriber.request_id
        if token_id in subscriber.stop_token_ids:
            self._note_end(sequence, subscriber, index, is_cut=False)
            keep_end(sequence, subscriber, Finish.STOP, num_tokens=index + 1)
            self.end(frontend, request_id, Finish.STOP, token_id, started=started, logprobs=own_logprobs)
        elif index + 1 >= subscriber.max_total_tokens:
            self._note_end(sequence, subscriber, index, is_cut=True)
            keep_end(sequence, subscriber, Finish.LENGTH, num_tokens=index + 1)
            self.end(frontend, request_id, Finish.LENGTH, token_id, started=started, logprobs=own_logprobs)
        else:
            self._link.push(frontend, request_id, token_id, started=started, logprobs=own_logprobs)
            return False
        return True

    def _note_end(self, sequence: Sequence, subscriber: Subscriber, index: int, *, is_cut: bool) -> None:
        if self._quote_errors is not None:
            self._quote_errors.note_end(subscriber, index + 1 - sequence.num_prompt_tokens, is_cut=is_cut)

    def start(self, sequence: Sequence, subscriber: Subscriber) -> Started:
        """Return the message that accompanies a subscriber's first token, or its vector."""
        subscriber.is_started, subscriber.resumed = True, None
        choice = subscriber.resumable
        if choice is not None and choice.started is not None:  # another reader
            return msgspec.structs.replace(choice.started, request_id=subscriber.request_id)
        if self._quote_errors is not None:
            self._quote_errors.note_first_token(subscriber)
        queue_s = 0.0 if subscriber.has_joined or sequence.queue_s is None else sequence.queue_s
        # After a preemption, generated tokens may have been found in the cache as well.
        num_cached = min(sequence.kv.num_cached, sequence.num_prompt_tokens)
        if not subscriber.has_joined:
            self._board.cached_tokens += num_cached
        started = Started(subscriber.request_id, num_cached, queue_s, subscriber.has_joined)
        if choice is not None:
            choice.started = started
        return started

    def fail(self, sequence: Sequence, code: FailureCode = FailureCode.INTERNAL, text: str = "") -> None:
        """End the sequence and all its requests, because of a bug of ours or a fault of its constraints."""
        for subscriber in list(sequence.subscribers):
            self.fail_one(sequence, subscriber, code, text)

    def fail_one(
        self, sequence: Sequence, subscriber: Subscriber, code: FailureCode = FailureCode.INTERNAL, text: str = ""
    ) -> None:
        """End one request; the sequence continues for its other subscribers."""
        failure = Failure(subscriber.request_id, code, text=text)
        keep_end(sequence, subscriber, Finish.FAILED, failure)
        self.end(subscriber.frontend, subscriber.request_id, Finish.FAILED, failure=failure)
        self._open_requests.remove(sequence, subscriber)

    def end(
        self,
        frontend: int,
        request_id: int,
        finish: Finish,
        token_id: int = NO_TOKEN,
        *,
        started: Started | None = None,
        failure: Failure | None = None,
        logprobs: EventLogprobs | None = None,
    ) -> None:
        """Send and count the last event of a request. The caller removes it from the table of open requests."""
        if (recorder := self._open_requests.recorder) is not None:
            recorder.note_end(frontend, request_id, finish, failure)
        self._link.push(frontend, request_id, token_id, finish, started=started, failure=failure, logprobs=logprobs)
        match finish:
            case Finish.STOP | Finish.LENGTH:
                self._board.requests_finished += 1
            case Finish.EXPIRED:
                self._board.requests_expired += 1
            case Finish.REJECTED:
                self._board.requests_rejected += 1
            case Finish.QUOTED:
                self._board.requests_quoted += 1
            case _ if failure is not None and failure.code == FailureCode.CANCELLED:
                self._board.requests_cancelled += 1
            case _:
                self._board.requests_failed += 1

    def repeat(self, frontend: int, message: Generate, choice: ResumableChoice, num_received: int) -> None:
        """Send a request that has ended to another reader, after the tokens that the reader has. It is not counted
        again."""
        request_id, width, tokens = message.request_id, message.sampling.num_reported, choice.tokens
        failure = None if choice.failure is None else msgspec.structs.replace(choice.failure, request_id=request_id)
        started = None if choice.started is None else msgspec.structs.replace(choice.started, request_id=request_id)
        entries = choice.logprobs if width >= 0 else None
        brings_end = failure is None and num_received < len(tokens)  # the last token does
        for index in range(num_received, len(tokens)):
            finish = choice.finish if brings_end and index + 1 == len(tokens) else Finish.NONE
            logprobs = None if entries is None else _narrowed(entries[index], 0, width)
            self._link.push(frontend, request_id, tokens[index], finish, started=started, logprobs=logprobs)
            started = None
        if not brings_end:
            self._link.push(frontend, request_id, NO_TOKEN, choice.finish, failure=failure)
        if (recorder := self._open_requests.recorder) is not None:
            recorder.note_end(frontend, request_id, choice.finish, failure)

    def answer(self, frontend: int, request_id: int, finish: Finish, failure: Failure | None = None) -> None:
        """Answer a request that does not run. It is neither counted nor recorded."""
        self._link.push(frontend, request_id, NO_TOKEN, finish, failure=failure)

    def end_with_quote(self, frontend: int, quote: Quote, failure: Failure | None = None) -> None:
        """End a request that is not in the table with its quote, and with the failure that follows from it."""
        self._link.push_answer(frontend, quote)
        finish = Finish.QUOTED if failure is None else Finish.REJECTED
        self.end(frontend, quote.request_id, finish, failure=failure)

    def announce_room(self, frontends: Iterable[int]) -> None:
        """The wait queue has places again for the frontends that it has refused."""
        for frontend in frontends:
            self._link.announce_room(frontend)

    def note_preemption(self, sequence: Sequence) -> None:
        for subscriber in sequence.subscribers:
            self._link.note_preemption(subscriber.frontend, subscriber.request_id)


def keep_end(
    sequence: Sequence,
    subscriber: Subscriber,
    finish: Finish,
    failure: Failure | None = None,
    *,
    num_tokens: int | None = None,
) -> None:
    """Keep the result of a request that lingers.

    It is then removed from the table of open requests. num_tokens counts the sequence's first tokens that belong to it;
    None means all.
    """
    if subscriber.resumable is not None:
        first = sequence.num_prompt_tokens
        tokens, logprobs = sequence.tokens[first:num_tokens], sequence.past_logprobs
        if subscriber.num_logprobs < 0 or logprobs is None:
            subscriber.resumable.end(finish, tokens, None, failure)
        else:
            subscriber.resumable.end(finish, tokens, logprobs[: len(tokens)], failure)


def _narrowed(logprobs: EventLogprobs, event: int, width: int) -> EventLogprobs:
    """The entry with its top width tokens only."""
    top_ids, top_logprobs = logprobs.top_ids[:width], logprobs.top_logprobs[:width]
    return EventLogprobs(event, logprobs.logprob, logprobs.rank, top_ids, top_logprobs)
