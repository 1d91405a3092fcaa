"""Makes quotes from the scheduler's present state and from the history."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from penstock.backend.engine.coalescer import Candidate
from penstock.backend.engine.interfaces import ISequenceScheduler
from penstock.backend.engine.quoting.forecast import Forecast, Room, Timeline, Work
from penstock.backend.engine.quoting.history import AnswerLengths, QuoteErrors
from penstock.backend.engine.steps.step_timing import StepTiming
from penstock.backend.scheduling.outlook import Outlook, Place
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.subscribers import Prediction, Subscriber
from penstock.shm.messages import AskQuote, Failure, FailureCode, Generate, Quote, QuoteTerms

_MAX_RETRY_AFTER_S = 60
_SAMPLE_INTERVAL_S = 0.25
"""A request that asks for no quote is quoted at most this often, to measure errors and correct later quotes."""


class Target(NamedTuple):
    """The request or sequence whose end is predicted."""

    sequence: Sequence
    limit: int
    """Tokens that the request's answers may have."""
    expected: int | None
    """Tokens of the longest choice; None if no answer's length is known."""
    terms: QuoteTerms

    @property
    def num_generated(self) -> int:
        return len(self.sequence.tokens) - self.sequence.num_prompt_tokens


class _View(NamedTuple):
    """Shared by all quotes until the outlook changes."""

    outlook: Outlook
    usual: Timeline
    """All sequences generate the usual number of tokens."""
    longest: Timeline
    """All generate as many as they may."""


class Quoter:
    """One backend's quotes. Keeps the history, and the view of the last quote."""

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
        self._outlook: Outlook | None = None
        """The present turn's."""
        self._view: _View | None = None
        self._next_sample_s = -math.inf
        self._sample: tuple[Sequence, Subscriber] | None = None

    def begin_turn(self) -> None:
        """The next quotes share one outlook, whatever starts to wait between them."""
        self._outlook = None

    def quote(self, message: AskQuote, candidate: Candidate) -> Quote:
        return self._quote(candidate.joined or candidate.new_sequence(), candidate.subscriber, message.terms)

    def find_late(self, message: Generate, candidate: Candidate) -> tuple[Quote, Failure] | None:
        """Return the quote and the failure of a request that asks to be refused if it is late, and would be.

        A request is not refused for an unknown time, nor one that another backend has admitted.
        """
        subscriber, terms = candidate.subscriber, message.refuse_late
        if terms is None or message.admitted_ns:
            return None
        quote = self._quote(candidate.joined or candidate.new_sequence(), subscriber, terms)
        if quote.finish_s is None or subscriber.deadline_s is None:
            return None
        late_s = subscriber.arrived_s + quote.finish_s - subscriber.deadline_s
        if late_s <= 0.0:
            return None
        retry_after_s = min(_MAX_RETRY_AFTER_S, math.ceil(late_s))
        return quote, Failure(message.request_id, FailureCode.TOO_LATE, retry_after_s=retry_after_s)

    def note_request(self, message: Generate, sequence: Sequence, subscriber: Subscriber) -> None:
        """Note a request that runs without a quote: now and then `quote_sample` quotes one, to measure errors. One that
        another backend has admitted is not measured."""
        if self._clock() >= self._next_sample_s and message.refuse_late is None and not message.admitted_ns:
            self._sample = sequence, subscriber

    def quote_sample(self) -> None:
        """Quote the request that was chosen since the last call. Call it when the turn's requests are taken in."""
        sample, self._sample = self._sample, None
        if sample is not None and sample[1] in sample[0].subscribers:
            self._quote(*sample, QuoteTerms())

    def _quote(self, sequence: Sequence, subscriber: Subscriber, terms: QuoteTerms) -> Quote:
        """The prediction is noted in the subscriber."""
        is_joined = subscriber not in sequence.subscribers
        limit = subscriber.max_total_tokens - sequence.num_prompt_tokens
        target = Target(sequence, limit, self._expected_tokens(sequence, limit, terms.num_choices), terms)
        self._next_sample_s = self._clock() + _SAMPLE_INTERVAL_S
        self._outlook = outlook = self._outlook or self._scheduler.outlook()
        if outlook is None:
            return Quote(subscriber.request_id, 0, 0, is_joined)
        place = outlook.place_of(sequence)
        known = subscriber.request_id, place.num_ahead, min(place.num_cached, sequence.num_prompt_tokens), is_joined
        if self._step_timing.typical_s(1) is None:
            return Quote(*known, expected_tokens=target.expected)
        if self._view is None or self._view.outlook is not outlook:
            self._view = self._look(outlook)
        return self._predict(target, place, self._view, subscriber, known)

    def _predict(
        self, target: Target, place: Place, view: _View, subscriber: Subscriber, known: tuple[int, int, int, bool]
    ) -> Quote:
        """The times are in order, whatever the errors say: first token, end, latest end."""
        first_token, finish = self._errors.first_token, self._errors.finish
        expected = target.expected
        usual = self._forecast(target, place, view, target.limit if expected is None else expected, view.usual)
        longest = self._forecast(target, place, view, target.limit, view.longest)
        waited_s = max(0.0, self._clock() - subscriber.arrived_s)  # for its grammar, or its turn
        latest_s = waited_s + max(1.0, finish.factor) * longest.finish_s
        first_token_s = waited_s + first_token.factor * usual.first_token_s
        finish_s = modelled_finish_s = None
        if expected is not None:
            finish_s, modelled_finish_s = waited_s + finish.factor * usual.finish_s, waited_s + usual.finish_s
            latest_s = max(latest_s, finish_s)
        first_token_s = min(first_token_s, latest_s if finish_s is None else finish_s)
        if target.terms.num_choices == 1:
            modelled_s = usual.first_token_s + waited_s
            subscriber.prediction = Prediction(first_token_s, modelled_s, finish_s, modelled_finish_s)
        return Quote(*known, first_token_s, finish_s, latest_s, expected)

    def _expected_tokens(self, sequence: Sequence, limit: int, num_choices: int) -> int | None:
        num_generated = len(sequence.tokens) - sequence.num_prompt_tokens
        if num_generated >= limit or not any(subscriber.stop_token_ids for subscriber in sequence.subscribers):
            return limit
        return self._lengths.expected_longest(num_choices, limit, num_generated)

    def _look(self, outlook: Outlook) -> _View:
        room = Room(outlook.num_slots, outlook.num_pages, outlook.max_batch_tokens)
        duration_s = cache(lambda num_tokens: self._step_timing.typical_s(num_tokens) or 0.0)
        timelines = []
        for lengths in (self._lengths, None):
            running = [self._work(sequence, outlook, lengths) for sequence in outlook.running]
            waiting = [self._work(sequence, outlook, lengths) for sequence in outlook.waiting]
            timelines.append(Timeline(running, waiting, room, duration_s, outlook.num_hidden))
        return _View(outlook, *timelines)

    def _work(self, sequence: Sequence, outlook: Outlook, lengths: AnswerLengths | None) -> Work:
        """The work of another sequence. Without lengths it generates as many tokens as it may."""
        num_known = len(sequence.tokens)
        num_generated = num_known - sequence.num_prompt_tokens
        limit = sequence.max_total_tokens - sequence.num_prompt_tokens
        total = lengths.expected(num_generated, limit) if lengths is not None else None
        num_left = max(1, (limit if total is None else min(limit, total)) - num_generated)
        num_pages = outlook.groups.most_pages(num_known + num_left)
        if sequence.slot is None:
            return Work(num_known, num_left, num_pages)
        return Work(max(1, num_known - sequence.num_computed), num_left, max(num_pages, len(sequence.kv.held_pages)))

    def _forecast(self, target: Target, place: Place, view: _View, num_expected: int, timeline: Timeline) -> Forecast:
        """Forecast the target with num_expected tokens."""
        sequence, terms, num_known = target.sequence, target.terms, len(target.sequence.tokens)
        num_left = max(1, num_expected - target.num_generated)
        if sequence.slot is not None:
            found = timeline.of_running(view.outlook.running.index(sequence), num_left)
        else:
            num_others = terms.num_choices - 1
            num_pages = view.outlook.groups.most_pages(num_known + num_left)
            work = Work(max(1, num_known - place.num_cached), num_left, num_pages)
            num_other_tokens = max(num_others, terms.num_other_prompt_tokens)
            found = timeline.of_newcomer(work, place.num_ahead, num_others, num_other_tokens if num_others else 0)
        # Tokens that a joined sequence has are sent at once.
        return found._replace(first_token_s=0.0) if target.num_generated else found
