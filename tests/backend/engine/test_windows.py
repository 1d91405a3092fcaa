"""Pages behind the window of all layers are given back while their sequence runs, and its tokens stay the same."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from penstock.backend.kv_cache.kv_groups import KvGroups
from penstock.backend.kv_cache.page_hash import extend_page_hashes
from tests.backend.engine.test_failed_steps import PassingFault
from tests.backend.harness import Bench, expected_tokens
from tests.fake_passes import GroupedFakePass, WindowedFakePass

WINDOW = WindowedFakePass.WINDOW_TOKENS
VOCAB = 97
CONTEXT = 400


PassClass = type[WindowedFakePass]


def for_one_group_and_several(one: int, several: int) -> pytest.MarkDecorator:
    """The test's pages for each: three groups need more."""
    return pytest.mark.parametrize(("pass_class", "num_pages"), [(WindowedFakePass, one), (GroupedFakePass, several)])


def make_bench(num_pages: int, forward_pass: Any = None, **options: Any) -> Bench:
    forward_pass = forward_pass or WindowedFakePass(VOCAB, 8)
    return Bench(forward_pass=forward_pass, num_pages=num_pages, page_size=2, max_context=CONTEXT, **options)


def expected(prompt: list[int], count: int, pass_class: PassClass = WindowedFakePass) -> list[int]:
    return expected_tokens(prompt, count, VOCAB, kv_windows=pass_class.KV_WINDOWS)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    prompt: list[int] = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    return prompt


@pytest.mark.parametrize("capacity", [0, 1, 3])
def test_sequence_holds_its_window_and_the_steps_ahead_however_long_it_is(capacity: int) -> None:
    most_pages = KvGroups.of(2, (WINDOW,), 8, capacity).most_pages(CONTEXT)
    bench = make_bench(most_pages, max_batch_tokens=8, capacity=capacity)
    prompt = prompt_of(150)
    bench.submit(prompt, 200)
    most_held = 0
    while bench.link.arrivals or bench.requests.table.num_open:
        bench.turn()
        most_held = max(most_held, bench.pool.num_held)
    assert bench.received().token_ids == expected(prompt, 200)
    assert bench.scheduler.num_preemptions == 0
    assert WINDOW // 2 < most_held <= most_pages < 40


@for_one_group_and_several(14, 48)
def test_sequences_that_preempt_each_other_continue_as_alone(pass_class: PassClass, num_pages: int) -> None:
    bench = make_bench(num_pages, pass_class(VOCAB, 8), max_batch_tokens=6, max_running=4)
    prompts = [prompt_of(3 + seed, seed) for seed in range(4)]
    for request_id, prompt in enumerate(prompts):
        bench.submit(prompt, 40, request_id=request_id)
    bench.run_dry()
    for request_id, prompt in enumerate(prompts):
        assert bench.received(request_id).token_ids == expected(prompt, 40, pass_class)
    assert bench.scheduler.num_preemptions > 0
    assert bench.pool.num_held == 0


@for_one_group_and_several(20, 90)
def test_late_joiner_receives_all_tokens_of_a_sequence_that_has_given_pages_back(
    pass_class: PassClass, num_pages: int
) -> None:
    bench, prompt = make_bench(num_pages, pass_class(VOCAB, 8), max_batch_tokens=8), prompt_of(30)
    bench.submit(prompt, 60, may_share=True)
    while len(bench.received().token_ids) < 30:
        bench.turn()
    bench.submit(prompt, 60, request_id=1, may_share=True)
    bench.run_dry()
    assert bench.received(1).token_ids == bench.received().token_ids == expected(prompt, 60, pass_class)
    assert bench.board.requests_coalesced == 1


def test_prefix_is_found_by_its_last_pages_when_its_first_ones_are_evicted() -> None:
    bench, prompt = make_bench(16, max_batch_tokens=8), prompt_of(40)
    bench.submit(prompt, 20)
    bench.run_dry()
    first_page: list[bytes] = []
    extend_page_hashes(first_page, array("i", prompt), 2, 2, b"")
    assert bench.pool.find(first_page[0]) is None
    turn = [*prompt, *bench.received().token_ids, *prompt_of(5, 1)]
    bench.submit(turn, 20, request_id=1)
    bench.run_dry()
    started = bench.received(1).started
    assert started is not None
    assert started.cached_tokens >= 58
    assert bench.received(1).token_ids == expected(turn, 20)


@for_one_group_and_several(40, 120)
@pytest.mark.parametrize("steps", [{3}, {9, 10}, {14, 20, 21}])
def test_passing_fault_fails_no_request(steps: set[int], pass_class: PassClass, num_pages: int) -> None:
    class Faulty(PassingFault, pass_class):  # type: ignore[misc, valid-type]
        pass

    bench = make_bench(num_pages, Faulty(steps, is_late=True), max_batch_tokens=6)
    prompts = [prompt_of(25, seed) for seed in range(3)]
    for request_id, prompt in enumerate(prompts):
        bench.submit(prompt, 30, request_id=request_id)
    bench.run_dry()
    for request_id, prompt in enumerate(prompts):
        assert bench.received(request_id).token_ids == expected(prompt, 30, pass_class)
