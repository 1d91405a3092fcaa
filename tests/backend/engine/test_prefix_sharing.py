"""Equal prefixes are computed once."""

from __future__ import annotations

import pytest

from penstock.shm.messages import Sampling
from tests.backend.harness import Bench, expected_tokens

PREFIX = [number % 90 for number in range(40)]


def computed_tokens(bench: Bench) -> int:
    return sum(batch.num_tokens for batch in bench.executor.batches)


def test_pages_of_a_finished_request_are_found_again() -> None:
    bench = Bench(page_size=4)
    bench.submit(PREFIX, 6)
    bench.run_dry()
    assert bench.pool.num_held == 0
    bench.submit([*PREFIX, 1, 2, 3], 6, request_id=1)
    before = computed_tokens(bench)
    bench.run_dry()
    received = bench.received(1)
    assert received.started is not None
    assert received.started.cached_tokens == 40
    assert computed_tokens(bench) - before == 3 + 5
    assert received.token_ids == expected_tokens([*PREFIX, 1, 2, 3], 6, bench.vocab_size)


def test_identical_prompt_still_computes_its_last_token() -> None:
    bench = Bench(page_size=4)
    for request_id in range(2):
        bench.submit(PREFIX, 6, request_id=request_id)
        bench.run_dry()
    started = bench.received(1).started
    assert started is not None
    assert started.cached_tokens == 39
    assert bench.received(1).token_ids == bench.received(0).token_ids


def test_pages_of_generated_tokens_are_found_again() -> None:
    bench = Bench(page_size=4)
    bench.submit([1, 2, 3], 30)
    bench.run_dry()
    tokens = bench.received().token_ids
    bench.submit([1, 2, 3, *tokens, 9], 4, request_id=1)
    bench.run_dry()
    started = bench.received(1).started
    assert started is not None
    assert started.cached_tokens == 32


def test_pages_of_a_cancelled_request_stay_reusable() -> None:
    bench = Bench(page_size=4, max_batch_tokens=16)
    bench.submit(PREFIX, 50)
    for _ in range(4):
        bench.turn()
    bench.cancel()
    bench.run_dry()
    assert bench.pool.num_held == 0
    bench.submit(PREFIX, 5, request_id=1)
    bench.run_dry()
    started = bench.received(1).started
    assert started is not None
    assert started.cached_tokens == 39


def test_tenants_do_not_find_each_others_pages() -> None:
    bench = Bench(page_size=4)
    bench.submit(PREFIX, 3, salt=b"one")
    bench.run_dry()
    bench.submit(PREFIX, 3, request_id=1, salt=b"two")
    bench.run_dry()
    started = bench.received(1).started
    assert started is not None
    assert started.cached_tokens == 0


def test_requests_that_arrive_together_compute_their_shared_prefix_once() -> None:
    bench = Bench(num_pages=400, page_size=4, max_running=32, max_batch_tokens=16, max_context=100)
    for request_id in range(32):
        bench.submit([*PREFIX, request_id, request_id + 1], 1, request_id=request_id)
    bench.run_dry()
    assert computed_tokens(bench) == len(PREFIX) + 32 * 2
    for request_id in range(32):
        expected = expected_tokens([*PREFIX, request_id, request_id + 1], 1, bench.vocab_size)
        assert bench.received(request_id).token_ids == expected


@pytest.mark.parametrize("max_batch_tokens", [5, 16, 64])
@pytest.mark.parametrize("page_size", [3, 7, 16, 64])
def test_prefix_that_ends_within_a_page_is_computed_once(page_size: int, max_batch_tokens: int) -> None:
    """Except for less than an eighth of a page: no sequence waits a step for that."""
    bench = Bench(num_pages=800, page_size=page_size, max_running=16, max_batch_tokens=max_batch_tokens)
    prompts = [[*PREFIX, request_id, 7, request_id + 1, 8] for request_id in range(16)]
    for request_id, prompt in enumerate(prompts):
        bench.submit(prompt, 1, request_id=request_id)
    bench.run_dry()
    assert computed_tokens(bench) <= len(PREFIX) + 16 * 4 + 15 * ((page_size - 1) // 8)
    cached = [received.started.cached_tokens for i in range(16) if (received := bench.received(i)).started is not None]
    assert sum(cached) == sum(map(len, prompts)) - computed_tokens(bench)
    for request_id, prompt in enumerate(prompts):
        assert bench.received(request_id).token_ids == expected_tokens(prompt, 1, bench.vocab_size)


def test_computed_part_of_a_page_in_use_by_a_decode_is_copied() -> None:
    bench = Bench(page_size=16)
    bench.submit([1, 2, 3], 40)
    for _ in range(6):
        bench.turn()
    tokens = list(bench.received().token_ids)
    assert len(tokens) == 5
    prompt = [1, 2, 3, *tokens, 9]
    bench.submit(prompt, 4, request_id=1)
    bench.run_dry()
    started = bench.received(1).started
    assert started is not None
    assert started.cached_tokens == 3 + 5  # the step just applied computed the KV of the last one
    assert bench.received(1).token_ids == expected_tokens(prompt, 4, bench.vocab_size)


def test_conversation_continues_within_the_page_in_which_the_last_answer_ended() -> None:
    bench = Bench(page_size=16)
    bench.submit([1, 2, 3], 5)
    bench.run_dry()
    prompt = [1, 2, 3, *bench.received().token_ids, 9, 9, 9]
    bench.submit(prompt, 4, request_id=1)
    bench.run_dry()
    started = bench.received(1).started
    assert started is not None
    assert started.cached_tokens == 3 + 4
    assert bench.received(1).token_ids == expected_tokens(prompt, 4, bench.vocab_size)


def test_page_copy_is_dropped_with_its_row() -> None:
    bench = Bench(page_size=16, capacity=1)
    bench.submit([1, 2, 3, 4], 2)
    bench.run_dry()
    bench.submit([1, 2, 3, 5], 8, request_id=1)
    bench.submit([1, 2, 3, 6], 8, request_id=2)
    bench.engine.turn()
    assert len(bench.executor.batches[-1].page_copies) == 0  # the plan behind it copies nothing
    planned = next(batch for batch in bench.executor.batches if batch.page_copies)
    assert [destination for _, destination in planned.page_copies] == planned.page_table[:, 0].tolist()
    plan, *_ = bench.executor._plans[0]
    kept = plan.keep([1])
    assert list(kept.page_copies.values()) == [planned.page_copies[1]]
    bench.cancel(1)
    bench.run_dry()
    assert bench.received(2).token_ids == expected_tokens([1, 2, 3, 6], 8, bench.vocab_size)


def test_source_of_a_page_copy_gets_no_new_owner_in_the_same_plan() -> None:
    """A newcomer copies from the newest running sequence. Then another tenant's newcomer takes that one's place."""
    bench = Bench(num_pages=8, page_size=32, max_running=8, max_batch_tokens=64, capacity=0)
    theirs, shared = [60, 61, 62, 63, 64, 65], [1, 2, 3, 4, 5, 6, 7, 8]
    bench.submit(theirs, 20, tenant=b"2", salt=b"2")
    bench.turn()
    for request_id, prompt in enumerate([*([20 + place] * 6 for place in range(5)), shared], start=1):
        bench.submit(prompt, 20, request_id=request_id, tenant=b"1", salt=b"1")
    bench.turn()
    bench.turn()
    newcomers = {7: [*shared, *range(70, 88)], 8: [*theirs, 9]}
    bench.submit(newcomers[7], 4, request_id=7, tenant=b"1", salt=b"1")
    bench.submit(newcomers[8], 4, request_id=8, tenant=b"2", salt=b"2")
    bench.turn()
    assert bench.board.preemptions
    assert len(bench.executor.batches[-1].page_copies) == 2
    bench.executor.batches[-1].check_page_moves()
    bench.run_dry()
    for request_id, prompt in newcomers.items():
        assert bench.received(request_id).token_ids == expected_tokens(prompt, 4, bench.vocab_size)


def test_copy_is_skipped_when_its_idle_source_is_needed_as_a_new_page() -> None:
    """Two full pages that are found, one to copy from and two to fill are one more than the four pages."""
    bench = Bench(num_pages=4, page_size=4)
    bench.submit([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 1)
    bench.run_dry()
    assert bench.pool.num_idle == 3
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13]
    bench.submit(prompt, 4, request_id=1)
    bench.run_dry()
    assert bench.received(1).token_ids == expected_tokens(prompt, 4, bench.vocab_size)


def test_request_that_shares_held_pages_is_admitted_without_free_ones_for_them() -> None:
    bench = Bench(num_pages=14, page_size=4, max_batch_tokens=64)
    bench.submit(PREFIX, 4)
    bench.turn()
    bench.turn()
    bench.submit([*PREFIX, 1], 3, request_id=1)
    bench.turn()
    assert bench.scheduler.num_running == 2
    bench.run_dry()
    assert bench.received(1).token_ids == expected_tokens([*PREFIX, 1], 3, bench.vocab_size)


@pytest.mark.parametrize("turns", range(5))
def test_parked_request_goes_on_when_the_one_computing_its_prefix_is_cancelled(turns: int) -> None:
    bench = Bench(page_size=4, max_batch_tokens=8)
    for request_id in range(4):
        bench.submit([*PREFIX, request_id], 5, request_id=request_id)
    for _ in range(turns):
        bench.turn()
    bench.cancel(0)
    bench.run_dry()
    for request_id in range(1, 4):
        assert bench.received(request_id).token_ids == expected_tokens([*PREFIX, request_id], 5, bench.vocab_size)


@pytest.mark.parametrize("max_park_steps", [2, 5])
def test_parked_request_computes_its_prefix_when_that_makes_no_progress(max_park_steps: int) -> None:
    """The device does not answer: the first request is planned to its end, and another stream goes on being planned."""
    bench = Bench(num_pages=200, page_size=4, capacity=20, max_batch_tokens=64, max_park_steps=max_park_steps)
    bench.submit([80, 81], 50, request_id=7)
    bench.turn()
    while bench.executor.run_one():
        pass
    bench.submit([*PREFIX, 1], 5, request_id=1)
    bench.submit([*PREFIX, 2], 5, request_id=2)
    bench.engine.turn()
    newcomers = [step for step, batch in enumerate(bench.executor.batches[-21:]) for _ in batch.slot_inits]
    assert newcomers == [0, max_park_steps]
    bench.run_dry()
    for request_id in (1, 2):
        assert bench.received(request_id).token_ids == expected_tokens([*PREFIX, request_id], 5, bench.vocab_size)


def test_request_stays_parked_while_its_prefix_makes_progress() -> None:
    bench = Bench(num_pages=200, page_size=4, max_batch_tokens=5, max_park_steps=2)
    for request_id in range(3):
        bench.submit([*PREFIX, request_id, 9], 1, request_id=request_id)
    bench.run_dry()
    assert computed_tokens(bench) == len(PREFIX) + 3 * 2


def test_nondeterministic_duplicates_share_the_prefill_and_differ_in_their_tokens() -> None:
    bench = Bench(num_pages=200, page_size=4, max_running=8)
    for request_id in range(6):
        sampling = Sampling(temperature=50.0, seed=request_id)
        bench.submit(PREFIX, 8, request_id=request_id, sampling=sampling)
    bench.run_dry()
    assert len({tuple(bench.received(request_id).token_ids) for request_id in range(6)}) == 6
    # Each request but the first computes only the last prompt token, because it needs its logits.
    assert computed_tokens(bench) == len(PREFIX) + 5 + 6 * 7
