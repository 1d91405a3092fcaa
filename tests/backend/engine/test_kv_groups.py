"""Groups of layers with pages of their own: each gives back what is behind its window; tokens stay the same.

What holds for one group as well is tested in `test_windows`.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.backend.kv_cache.kv_groups import KvGroups
from tests.backend.engine.test_windows import CONTEXT, VOCAB, prompt_of
from tests.backend.harness import Bench, expected_tokens
from tests.fake_passes import GroupedFakePass

WINDOWS = GroupedFakePass.KV_WINDOWS


def make_bench(num_pages: int, **options: Any) -> Bench:
    return Bench(
        forward_pass=GroupedFakePass(VOCAB, 8), num_pages=num_pages, page_size=2, max_context=CONTEXT, **options
    )


def expected(prompt: list[int], count: int) -> list[int]:
    return expected_tokens(prompt, count, VOCAB, kv_windows=WINDOWS)


@pytest.mark.parametrize("capacity", [0, 1, 3])
def test_sequence_holds_all_pages_of_one_group_and_the_windows_of_the_others(capacity: int) -> None:
    groups = KvGroups.of(2, WINDOWS, 8, capacity)
    most_pages = groups.most_pages(351)
    bench = make_bench(groups.most_pages(CONTEXT), max_batch_tokens=8, capacity=capacity)
    prompt = prompt_of(150)
    bench.submit(prompt, 200)
    most_held = 0
    while bench.link.arrivals or bench.requests.table.num_open:
        bench.turn()
        most_held = max(most_held, bench.pool.num_held)
    assert bench.received().token_ids == expected(prompt, 200)
    assert bench.scheduler.num_preemptions == 0
    assert 175 < most_held <= most_pages < 240


def test_context_is_what_the_pages_of_all_groups_hold() -> None:
    groups = KvGroups.of(2, WINDOWS, 8, 1)
    longest = groups.longest_sequence(100, CONTEXT)
    assert groups.most_pages(longest) <= 100 < groups.most_pages(longest + 1)
    assert longest > 100 // 3 * 2, "as many tokens as there are whole sets"


def test_newcomer_waits_for_pages_that_an_earlier_prompt_will_take() -> None:
    """The first prompt lists only the pages of its first steps; the rest are promised to it."""
    groups = KvGroups.of(2, WINDOWS, 4, 1)
    bench = make_bench(groups.most_pages(100) + 6, max_batch_tokens=4)
    prompts = [prompt_of(90), prompt_of(40, 1)]
    for request_id, prompt in enumerate(prompts):
        bench.submit(prompt, 8, request_id=request_id)
    bench.run_dry()
    for request_id, prompt in enumerate(prompts):
        assert bench.received(request_id).token_ids == expected(prompt, 8)
    assert bench.scheduler.num_preemptions == 0


def test_next_turn_of_a_chat_finds_all_pages_and_the_last_ones_within_the_windows() -> None:
    bench, prompt = make_bench(120, max_batch_tokens=8), prompt_of(40)
    bench.submit(prompt, 20)
    bench.run_dry()
    turn = [*prompt, *bench.received().token_ids, *prompt_of(5, 1)]
    bench.submit(turn, 20, request_id=1)
    bench.run_dry()
    started = bench.received(1).started
    assert started is not None
    assert started.cached_tokens == 58
    assert bench.received(1).token_ids == expected(turn, 20)


def test_prefix_ends_where_every_group_still_has_its_pages() -> None:
    """A prompt that leaves the first one in its middle, where the windows' pages were given back and evicted."""
    bench, prompt = make_bench(75, max_batch_tokens=8), prompt_of(60)
    bench.submit(prompt, 2)
    bench.run_dry()
    bench.submit(prompt_of(30, 2), 2, request_id=1)
    bench.run_dry()
    fork = [*prompt[:30], *prompt_of(10, 1)]
    bench.submit(fork, 20, request_id=2)
    bench.run_dry()
    started = bench.received(2).started
    assert started is not None
    assert started.cached_tokens < 30
    assert bench.received(2).token_ids == expected(fork, 20)
