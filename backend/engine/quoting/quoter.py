"""Makes quotes from the scheduler's present state and from the history."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from penstock.backend.engine.quoting.forecast import Forecast, Room, Work, forecast
from penstock.backend.sequences.subscribers import Prediction
from penstock.shm.messages import Failure, FailureCode, Quote, QuoteTerms

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.backend.engine.coalescer import Candidate
    from penstock.backend.engine.interfaces import ISequenceScheduler
    from penstock.backend.engine.quoting.history import QuoteErrors
    from penstock.backend.engine.steps.step_timing import StepTiming
    from penstock.backend.scheduling.outlook import Outlook
    from penstock.backend.sequences.sequence import Sequence
    from penstock.backend.sequences.subscribers import Subscriber
    from penstock.shm.messages import AskQuote, Generate

_MAX_MODELLED = 256
"""Waiting sequences whose start is modelled; earlier ones are assumed to start at the same rate."""
_MAX_RETRY_AFTER_S = 60
_SAMPLE_INTERVAL_S = 0.25
"""A request that asks for no quote is quoted at most this often, to measure errors and correct later quotes."""


class Target(NamedTuple):
    """The request or sequence whose end is predicted."""

    sequence: Sequence
    limit: int
    """Tokens that the request's answers may have."""
    num_choices: int
    num_other_prompt_tokens: int


class Quoter:
    """One backend's quotes. Keeps nothing except the history."""

    def __init__(
        self,
        scheduler: ISequenceScheduler,
        step_timing: StepTiming,
        errors: QuoteErrors,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler = scheduler
        self._step_timing = step_timing
        self._errors = errors
        self._lengths = errors.answer_lengths
        self._clock = clock
        self._next_sample_s = -math.inf

    def quote(self, message: AskQuote, candidate: Candidate) -> Quote:
        return self._quote(candidate, message.terms)

    def find_late(self, message: Generate, candidate: Candidate) -> tuple[Quote, Failure] | None:
        """Return the quote and the failure of a request that asks to be refused if it is late, and would be. Some
        others are quoted to measure errors.

        A request is not refused for an unknown time, nor one that another backend has admitted; the answer to that one
        is not measured either.
        """
        subscriber, terms = candidate.subscriber, message.refuse_late
        if message.admitted_ns or (terms is None and self._clock() < self._next_sample_s):
            return None
        quote = self._quote(candidate, terms or QuoteTerms())
        if terms is None or quote.finish_s is None or subscriber.deadline_s is None:
            return None
        late_s = subscriber.arrived_s + quote.finish_s - subscriber.deadline_s
        if late_s <= 0.0:
            return None
        retry_after_s = min(_MAX_RETRY_AFTER_S, math.ceil(late_s))
        return quote, Failure(message.request_id, FailureCode.TOO_LATE, retry_after_s=retry_after_s)

    def _quote(self, candidate: Candidate, terms: QuoteTerms) -> Quote:
        """The prediction is noted in the subscriber."""
        subscriber, request_id = candidate.subscriber, candidate.subscriber.request_id
        sequence, is_joined = candidate.joined or candidate.new_sequence(), candidate.joined is not None
        limit = subscriber.max_total_tokens - sequence.num_prompt_tokens
        target = Target(sequence, limit, terms.num_choices, terms.num_other_prompt_tokens)
        self._next_sample_s = self._clock() + _SAMPLE_INTERVAL_S
        outlook = self._scheduler.outlook(sequence)
        if outlook is None:
            return Quote(request_id, 0, 0, is_joined)
        return self._predict(request_id, target, outlook, subscriber, is_joined=is_joined)

    def _predict(
        self, request_id: int, target: Target, outlook: Outlook, subscriber: Subscriber, *, is_joined: bool
    ) -> Quote:
        sequence = target.sequence
        num_ahead = len(outlook.waiting) if sequence.slot is None else 0
        num_cached = min(outlook.num_cached, sequence.num_prompt_tokens)
        expected = self._expected_tokens(target)
        if self._step_timing.typical_s(1) is None:
            return Quote(request_id, num_ahead, num_cached, is_joined, expected_tokens=expected)
        usual = self._forecast(target, outlook, expected)
        longest = self._forecast(target, outlook, None)
        waited_s = self._clock() - subscriber.arrived_s  # for its grammar
        first_token_s = self._errors.first_token.factor * usual.first_token_s + waited_s
        finish_s = None if expected is None else self._errors.finish.factor * usual.finish_s + waited_s
        modelled_finish_s = None if expected is None else usual.finish_s + waited_s
        if target.num_choices == 1:
            subscriber.prediction = Prediction(
                first_token_s, usual.first_token_s + waited_s, finish_s, modelled_finish_s
            )
        latest_s = max(1.0, self._errors.finish.factor) * longest.finish_s + waited_s
        if finish_s is not None:
            first_token_s, latest_s = min(first_token_s, finish_s), max(latest_s, finish_s)
        return Quote(request_id, num_ahead, num_cached, is_joined, first_token_s, finish_s, latest_s, expected)

    def _expected_tokens(self, target: Target) -> int | None:
        """The expected length of the longest choice; None if no answer's length is known."""
        if not any(subscriber.stop_token_ids for subscriber in target.sequence.subscribers):
            return target.limit
        num_generated = len(target.sequence.tokens) - target.sequence.num_prompt_tokens
        if num_generated >= target.limit:
            return target.limit
        return self._lengths.expected_longest(target.num_choices, target.limit, num_generated)

    def _forecast(self, target: Target, outlook: Outlook, num_expected: int | None) -> Forecast:
        """Forecast the target with num_expected tokens, and others with the usual number. With None, all generate as
        many as they may."""
        lengths = self._lengths if num_expected is not None else None

        def work(sequence: Sequence) -> Work:
            num_known = len(sequence.tokens)
            num_generated = num_known - sequence.num_prompt_tokens
            limit = sequence.max_total_tokens - sequence.num_prompt_tokens
            total = lengths.expected(num_generated, limit) if lengths is not None else None
            num_left = max(1, (limit if total is None else min(limit, total)) - num_generated)
            num_pages = outlook.groups.most_pages(num_known + num_left)
            if sequence.slot is None:
                return Work(num_known, num_left, num_pages)
            return Work(
                max(1, num_known - sequence.num_computed), num_left, max(num_pages, len(sequence.kv.held_pages))
            )

        running = [work(sequence) for sequence in outlook.running]
        ahead = outlook.waiting[-_MAX_MODELLED:]
        waiting = [work(sequence) for sequence in ahead]
        sequence = target.sequence
        num_known = len(sequence.tokens)
        num_generated = num_known - sequence.num_prompt_tokens
        num_left = max(1, (target.limit if num_expected is None else num_expected) - num_generated)
        num_pages = outlook.groups.most_pages(num_known + num_left)
        if sequence.slot is not None:
            index = outlook.running.index(sequence)
            running[index] = Work(running[index].num_given, num_left, running[index].num_pages)
        else:
            others = target.num_choices - 1
            share = target.num_other_prompt_tokens // max(1, others)
            waiting += [Work(max(1, share), num_left, num_pages)] * others
            waiting.append(Work(max(1, num_known - outlook.num_cached), num_left, num_pages))
            index = len(running) + len(waiting) - 1
        room = Room(outlook.num_slots, outlook.num_pages, outlook.max_batch_tokens)
        predicted = forecast(running, waiting, index, room, self._duration_s())
        if num_generated:  # tokens that a joined sequence has are sent at once
            return Forecast(0.0, predicted.finish_s)
        late_s = self._start_of_hidden_s(running, waiting, len(outlook.waiting) - len(ahead), room)
        return Forecast(predicted.first_token_s + late_s, predicted.finish_s + late_s)

    def _start_of_hidden_s(self, running: list[Work], waiting: list[Work], num_hidden: int, room: Room) -> float:
        """Seconds until num_hidden sequences before the waiting ones have started, at the rate of the waiting ones."""
        if not num_hidden:
            return 0.0
        last = len(running) + len(waiting) - 1
        start_s = forecast(running, waiting, last, room, self._duration_s()).first_token_s
        return start_s * num_hidden / len(waiting)

    def _duration_s(self) -> Callable[[int], float]:
        return cache(lambda num_tokens: self._step_timing.typical_s(num_tokens) or 0.0)
