"""Quotes, compared with what the real scheduler then does on a device whose steps take 0.1 s each."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.backend.engine.quoting import quoter
from penstock.backend.engine.quoting.forecast import Timeline
from penstock.shm.messages import AskQuote, FailureCode, Finish, Quote, QuoteTerms
from tests.backend.harness import Bench

STEP_S = 0.1
TERMS = QuoteTerms()


class TimedBench(Bench):
    """Its clock runs with its device, if each step is one turn."""

    def tick(self) -> None:
        self.executor.step_s = STEP_S
        if self.executor.run_one():
            self.now_s += STEP_S
        self.engine.turn()
        self.engine.check_integrity()

    def tick_until_end(self, *request_ids: int) -> list[tuple[float, float]]:
        """(first token, end) of each request."""
        firsts: dict[int, float] = {}
        ends: dict[int, float] = {}
        while len(ends) < len(request_ids):
            self.tick()
            for request_id in request_ids:
                received = self.received(request_id)
                if received.token_ids:
                    firsts.setdefault(request_id, self.now_s)
                if received.finishes:
                    ends.setdefault(request_id, self.now_s)
        return [(firsts[request_id], ends[request_id]) for request_id in request_ids]

    def quote(self, prompt: list[int], max_tokens: int, terms: QuoteTerms = TERMS, **options: object) -> Quote:
        request_id = 1000 + len(self.link.received)
        self.submit(prompt, max_tokens, request_id=request_id, kind=AskQuote, terms=terms, **options)
        self.engine.turn()
        received = self.received(request_id)
        assert received.finishes == [Finish.QUOTED]
        assert received.quote is not None
        return received.quote


def warm(**sizes: int) -> TimedBench:
    """A bench that has seen steps, and answers that were cut by their limit of 8 tokens."""
    bench = TimedBench(**sizes)  # type: ignore[arg-type]
    bench.submit([1, 2], 8, request_id=900)
    bench.tick_until_end(900)
    return bench


def test_new_backend_says_that_it_does_not_know() -> None:
    bench = TimedBench()
    quote = bench.quote([1, 2, 3], 5, stop_ids=(96,))
    assert (quote.first_token_s, quote.finish_s, quote.latest_finish_s, quote.expected_tokens) == (None,) * 4
    assert bench.board.requests_quoted == 1
    assert bench.is_idle
    bench.submit([1, 2, 3], 5, request_id=1, timeout_ms=1, refuse_late=TERMS)
    bench.engine.turn()
    assert not bench.received(1).finishes, "what is unknown refuses nothing"


def test_quote_of_an_idle_backend_is_what_happens_then() -> None:
    bench = warm()
    quote = bench.quote([5] * 40, 10)
    assert (quote.num_ahead, quote.cached_tokens, quote.is_coalesced, quote.expected_tokens) == (0, 0, False, 10)
    start_s = bench.now_s
    bench.submit([5] * 40, 10, request_id=1)
    ((first_s, end_s),) = bench.tick_until_end(1)
    assert quote.first_token_s == pytest.approx(first_s - start_s, abs=1.5 * STEP_S)
    assert quote.finish_s == quote.latest_finish_s == pytest.approx(end_s - start_s, abs=1.5 * STEP_S)


@pytest.mark.parametrize("seed", range(6))
def test_quote_behind_a_queue_is_near_to_what_happens_then(seed: int) -> None:
    rng = random.Random(seed)
    bench = warm(max_running=3, num_pages=200)
    for request_id in range(20):
        prompt = [rng.randrange(90) for _ in range(rng.randint(1, 40))]
        bench.submit(prompt, rng.randint(1, 12), request_id=request_id, tenant=bytes([rng.randrange(2)]))
    for _ in range(3):
        bench.tick()
    quote = bench.quote([7] * 9, 6, tenant=b"\0")
    assert quote.num_ahead > 5
    start_s = bench.now_s
    bench.submit([7] * 9, 6, request_id=50, tenant=b"\0")
    ((first_s, end_s),) = bench.tick_until_end(50)
    assert quote.first_token_s == pytest.approx(first_s - start_s, rel=0.3)
    assert quote.finish_s == pytest.approx(end_s - start_s, rel=0.3)


def test_another_tenant_waits_less_than_the_one_that_has_filled_the_queue() -> None:
    bench = warm(max_running=1)
    for request_id in range(10):
        bench.submit([request_id], 5, request_id=request_id, tenant=b"a")
    bench.tick()
    same, other = bench.quote([70], 5, tenant=b"a"), bench.quote([70], 5, tenant=b"b")
    assert same.num_ahead == 9
    assert other.num_ahead < 2
    assert same.finish_s is not None
    assert other.finish_s is not None
    assert same.finish_s > 3 * other.finish_s


def test_quote_counts_cached_prompts_and_equal_requests_in_flight() -> None:
    bench = warm()
    prompt = list(range(40))
    uncached = bench.quote(prompt, 10)
    bench.submit(prompt, 20, request_id=1)
    bench.tick_until_end(1)
    cached = bench.quote(prompt, 10)
    assert (uncached.cached_tokens, cached.cached_tokens) == (0, 39)
    assert cached.first_token_s is not None
    assert uncached.first_token_s is not None
    assert cached.first_token_s < uncached.first_token_s
    bench.submit(prompt, 20, request_id=2, may_share=True)
    for _ in range(8):
        bench.tick()
    joining = bench.quote(prompt, 20, may_share=True)
    assert joining.is_coalesced
    assert joining.first_token_s == 0.0
    start_s = bench.now_s
    assert joining.finish_s == pytest.approx(bench.tick_until_end(2)[0][1] - start_s, abs=1.5 * STEP_S)


def test_request_with_several_choices_finishes_with_the_last() -> None:
    bench = warm(max_running=2)
    one, four = (
        bench.quote([1], 10),
        bench.quote([1], 10, QuoteTerms(num_choices=4, num_other_prompt_tokens=3)),
    )
    assert one.finish_s is not None
    assert four.finish_s == pytest.approx(2 * one.finish_s, rel=0.2)


def test_answers_that_may_stop_are_expected_to_be_as_long_as_others_were() -> None:
    bench = TimedBench(vocab_size=5)
    for request_id in range(60):
        bench.submit([request_id % 5, request_id // 5 % 5, 1], 100, request_id=request_id, stop_ids=(4,))
        bench.tick_until_end(request_id)
    lengths = [len(bench.received(request_id).token_ids) for request_id in range(60)]
    quote = bench.quote([2, 2], 100, stop_ids=(4,))
    assert quote.expected_tokens == pytest.approx(sum(lengths) / 60, abs=1)
    assert quote.finish_s is not None
    assert quote.latest_finish_s is not None
    assert quote.latest_finish_s > 5 * quote.finish_s
    assert bench.quote([2, 2], 100).expected_tokens == 100, "without a stop token only its limit ends it"


def test_request_that_would_be_late_is_refused_if_it_asks_so() -> None:
    bench = warm()
    bench.submit([9], 100, request_id=1, timeout_ms=5000, refuse_late=TERMS)
    bench.submit([9], 100, request_id=2, timeout_ms=20_000, refuse_late=TERMS)
    bench.submit([9], 100, request_id=3, timeout_ms=5000)
    bench.submit([9], 100, request_id=4, timeout_ms=5000, refuse_late=TERMS, admitted_ns=1)
    bench.engine.turn()
    refused = bench.received(1)
    assert refused.finishes == [Finish.REJECTED]
    assert refused.failure is not None
    assert (refused.failure.code, refused.failure.retry_after_s) == (FailureCode.TOO_LATE, 6)
    assert refused.quote is not None
    assert refused.quote.finish_s == pytest.approx(10.0, rel=0.1)
    assert not any(bench.received(request_id).finishes for request_id in (2, 3, 4))
    ends = [received.finishes for received in map(bench.received, (2, 3))]
    bench.tick_until_end(2, 3)
    assert ends == [[Finish.LENGTH], [Finish.EXPIRED]]


def test_quotes_beyond_a_turns_number_wait_for_the_next_turns_while_streams_go_on() -> None:
    bench = warm()
    bench.submit([9], 100, request_id=1)
    bench.tick()
    for request_id in range(100, 140):
        bench.submit([7], 5, request_id=request_id, kind=AskQuote, terms=TERMS)
    bench.submit([7], 5, request_id=50, kind=AskQuote, terms=TERMS, tenant=b"other")
    bench.submit([7], 5, request_id=51, timeout_ms=60_000, refuse_late=TERMS)
    bench.cancel(139)
    num_quoted = []
    for _ in range(3):
        num_tokens = len(bench.received(1).token_ids)
        bench.tick()
        assert len(bench.received(1).token_ids) == num_tokens + 1
        num_quoted.append(bench.board.requests_quoted)
        assert (bench.engine.next_turn_s() == 0.0) == (num_quoted[-1] < 40)
        assert bench.received(50).finishes == [Finish.QUOTED], "tenants take turns"
    assert num_quoted == [16, 32, 40]
    assert not bench.received(139).finishes
    bench.tick_until_end(51)


def test_quotes_of_a_turn_share_one_view_and_know_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = warm(max_running=2)
    num_made = 0

    def counted(*args: Any) -> Timeline:
        nonlocal num_made
        num_made += 1
        return Timeline(*args)

    monkeypatch.setattr(quoter, "Timeline", counted)
    for request_id in range(10):
        bench.submit([request_id], 10, request_id=request_id, timeout_ms=2500, refuse_late=TERMS)
    bench.engine.turn()
    assert num_made == 2  # with the usual and with the longest answers
    refused = [received.quote for received in map(bench.received, range(10)) if received.finishes]
    assert len(refused) >= 4, "two run at a time, for a second each"
    assert all(quote is not None and quote.finish_s is not None and quote.finish_s > 2.5 for quote in refused)


@pytest.mark.parametrize(("first_s", "finish_s"), [(1e9, 0.0), (0.0, 1e9), (0.0, 0.0), (1e9, 1e9)])
@pytest.mark.parametrize("stop_ids", [(), (96,)])
def test_no_errors_of_the_past_make_a_quote_contradict_itself(
    first_s: float, finish_s: float, stop_ids: tuple[int, ...]
) -> None:
    bench = warm(max_running=2)
    for request_id in range(30):
        bench.submit([request_id], 30, request_id=request_id, tenant=bytes([request_id % 3]))
    bench.tick()
    errors = bench.requests.intake._quoter._errors
    for _ in range(50):
        errors.first_token.note(1.0, first_s)
        errors.finish.note(1.0, finish_s)
    quotes = [bench.quote([5] * 9, 50, stop_ids=stop_ids, tenant=tenant) for tenant in (b"\0", b"new")]
    errors.answer_lengths.note(3, is_cut=False)
    quotes.append(bench.quote([5], 50, QuoteTerms(num_choices=9), stop_ids=stop_ids))
    for quote in quotes:
        times = [0.0, quote.first_token_s, quote.finish_s, quote.latest_finish_s]
        known = [time_s for time_s in times if time_s is not None]
        assert len(known) >= 3
        assert known == sorted(known)


def test_full_wait_queue_and_draining_backend_give_no_quote() -> None:
    bench = TimedBench(max_running=1, max_waiting=2)
    for request_id in range(4):
        bench.submit([request_id], 5, request_id=request_id)
    bench.submit([8], 5, request_id=8, kind=AskQuote)
    bench.engine.turn()
    assert bench.received(8).failure.code == FailureCode.OVERLOADED  # type: ignore[union-attr]
    bench.engine._intake.is_draining = True
    bench.submit([8], 5, request_id=9, kind=AskQuote)
    bench.engine.turn()
    assert bench.received(9).failure.code == FailureCode.SHUTTING_DOWN  # type: ignore[union-attr]


def test_errors_of_quotes_are_measured_without_being_asked_for_and_correct_later_quotes() -> None:
    bench = warm()
    for request_id in range(30):
        bench.submit([request_id], 10, request_id=request_id)
        bench.engine.turn()
        bench.now_s += 0.5  # what the model of the scheduler does not know
        bench.tick_until_end(request_id)
    values = bench.board.values()
    buckets, total_us = type(bench.board).quote_error_finish_us.read(values)
    assert sum(buckets) == 30
    assert buckets[-1] == 0
    start_s = bench.now_s
    quote = bench.quote([77], 10)
    assert total_us / 30e6 == pytest.approx(0.0, abs=0.3)
    bench.submit([77], 10, request_id=77)
    bench.engine.turn()
    bench.now_s += 0.5
    ((_, end_s),) = bench.tick_until_end(77)
    assert quote.finish_s == pytest.approx(end_s - start_s, abs=1.5 * STEP_S)
