"""Requests that ask for it receive how much of their prompt is computed, until their first token."""

from __future__ import annotations

from tests.backend.harness import Bench, expected_tokens

PROMPT = list(range(1, 31))


def test_each_step_of_a_long_prompt_is_reported_and_the_last_is_the_first_token() -> None:
    bench = Bench(max_batch_tokens=8)
    bench.submit(PROMPT, 4, reports_progress=True)
    while not bench.received().token_ids:
        bench.turn()
        bench.now_s += 0.5
    bench.run_dry()
    reports = bench.received().progress
    assert [(report.cached_tokens, report.computed_tokens) for report in reports] == [(0, 8), (0, 16), (0, 24)]
    spent_s = [report.spent_s for report in reports]
    assert spent_s == sorted(set(spent_s))
    assert bench.received().token_ids == expected_tokens(PROMPT, 4, bench.vocab_size)


def test_cached_tokens_count_as_computed_and_who_does_not_ask_receives_nothing() -> None:
    bench = Bench(max_batch_tokens=8)
    bench.submit(PROMPT[:17], 2, request_id=1)
    bench.run_dry()
    for request_id in (2, 3):  # they share a sequence
        bench.submit(PROMPT, 4, request_id=request_id, may_share=True, reports_progress=request_id == 2)
    bench.run_dry()
    reports = [(report.cached_tokens, report.computed_tokens) for report in bench.received(2).progress]
    assert reports == [(17, 25)]  # all that the first prompt has in common
    assert not bench.received(1).progress
    assert not bench.received(3).progress
    assert bench.received(3).token_ids == expected_tokens(PROMPT, 4, bench.vocab_size)


def test_prompt_of_one_step_has_no_progress() -> None:
    bench = Bench()
    bench.submit(PROMPT[:5], 2, reports_progress=True)
    bench.run_dry()
    assert not bench.received().progress
