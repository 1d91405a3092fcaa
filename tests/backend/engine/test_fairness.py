"""Tenants take turns, short prompts do not wait for long ones, and what does not fit is passed."""

from __future__ import annotations

import pytest

from penstock.shm.messages import Sampling
from tests.backend.harness import Bench, expected_tokens

HOT = Sampling(temperature=1.0)
FLOOD = range(400)
SHORT = 1000
SIZES = ((1, 506), (3, 1000), (5, 60), (9, 3))
"""(step from token to token, tokens) of prompts that fill 400 pages of 4 tokens."""


def flood(
    bench: Bench, requests: range = FLOOD, *, prompt_tokens: int = 40, max_tokens: int = 60, tenant: bytes = b"flood"
) -> None:
    """Requests of one tenant; each prompt is another."""
    for number in requests:
        prompt = [1 + number % 90, 1 + number // 90, *range(prompt_tokens - 2)]
        bench.submit(prompt, max_tokens, request_id=number, tenant=tenant, salt=tenant)


def turns_until_token(bench: Bench, request_id: int, at_most: int = 300) -> int:
    for turn in range(at_most):
        if (1, request_id) in bench.link.received and bench.received(request_id).token_ids:
            return turn
        bench.turn()
    raise AssertionError(f"no token of request {request_id} after {at_most} turns")


@pytest.fixture
def bench() -> Bench:
    return Bench(num_pages=400, page_size=4, max_running=8, max_batch_tokens=32)


def test_short_request_beside_another_tenants_flood_has_its_token_in_a_few_steps(bench: Bench) -> None:
    flood(bench)
    for _ in range(20):
        bench.turn()
    assert bench.scheduler.num_free_slots == 0
    for number in range(5):
        bench.submit([7, 8, 9], 2, request_id=SHORT + number, tenant=b"short", salt=b"short")
        assert turns_until_token(bench, SHORT + number) <= 4
    bench.close()


def prompt_tokens_of_steps(bench: Bench, num_turns: int) -> list[int]:
    found = []
    for _ in range(num_turns):
        before, generated = bench.board.computed_tokens, bench.board.generated_tokens
        bench.turn()
        found.append(bench.board.computed_tokens - before - (bench.board.generated_tokens - generated))
    return found


def test_step_with_another_tenants_short_prompt_has_few_tokens_of_the_flood() -> None:
    bench = Bench(num_pages=400, page_size=4, max_running=8, max_batch_tokens=256)
    flood(bench, prompt_tokens=90, max_tokens=2)
    for _ in range(5):
        bench.turn()
    assert max(prompt_tokens_of_steps(bench, 4)) > 200
    bench.submit([7, 8, 9], 2, request_id=SHORT, tenant=b"short", salt=b"short")
    sizes = prompt_tokens_of_steps(bench, 4)
    assert bench.received(SHORT).token_ids
    assert min(sizes[:-1]) <= 64
    bench.close()


def test_steps_are_mostly_whole_while_new_tenants_keep_coming() -> None:
    bench = Bench(num_pages=2000, page_size=4, max_running=64, max_batch_tokens=256)
    flood(bench, prompt_tokens=90, max_tokens=2)
    sizes = []
    for number in range(40):
        bench.submit([7, 8, 9], 2, request_id=SHORT + number, tenant=b"%d" % number, salt=b"%d" % number)
        sizes += prompt_tokens_of_steps(bench, 1)
    assert sum(size > 64 for size in sizes) >= 28
    bench.close()


def test_short_request_takes_pages_from_a_tenant_that_holds_them_all() -> None:
    bench = Bench(num_pages=60, page_size=4, max_running=8, max_batch_tokens=32)
    flood(bench, range(40), max_tokens=40)
    for _ in range(20):
        bench.turn()
    assert bench.pool.num_available < 3
    bench.submit(list(range(20)), 2, request_id=SHORT, tenant=b"short", salt=b"short")
    assert turns_until_token(bench, SHORT) <= 5
    assert bench.run_dry() > 0
    bench.close()


def test_three_tokens_behind_a_huge_prompt_wait_a_few_steps(bench: Bench) -> None:
    bench.submit(list(range(90)) * 10, 4, request_id=1, sampling=HOT)
    for _ in range(3):
        bench.turn()
    bench.submit([1, 2, 3], 2, request_id=2, sampling=HOT)
    assert turns_until_token(bench, 2) <= 3
    assert not bench.received(1).token_ids
    bench.run_dry()
    bench.close()


def test_many_short_prompts_leave_a_long_one_most_of_each_step(bench: Bench) -> None:
    bench.submit(list(range(80)) * 8, 1, request_id=1, sampling=HOT)
    for number in range(2, 400):
        bench.submit([number % 97, number // 97, *range(20)], 1, request_id=number, sampling=HOT)
    assert turns_until_token(bench, 1) <= 640 / (0.75 * 32 - 8) + 3
    bench.run_dry()
    bench.close()


def test_head_that_does_not_fit_is_passed_but_not_for_ever() -> None:
    bench = Bench(num_pages=100, page_size=4, max_running=8, max_batch_tokens=64, max_context=400)
    bench.submit(list(range(80)), 120, request_id=1, sampling=HOT)  # holds 20 pages, and 50 in the end
    bench.turn()
    bench.submit([*range(90, 0, -1)] * 4, 4, request_id=2, sampling=HOT)  # needs 91
    bench.submit([1, 2, 3], 2, request_id=3, sampling=HOT)
    assert turns_until_token(bench, 3) <= 3
    number = 4
    while (1, 2) not in bench.link.received or not bench.received(2).token_ids:
        for _ in range(4):  # without an end
            bench.submit([number % 97, number // 97 % 97, *range(10)], 3, request_id=number, sampling=HOT)
            number += 1
        bench.turn()
        assert number < 2000, "the long prompt is never admitted"
    assert number > 40
    bench.run_dry()
    bench.close()


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.75)])
def test_backlogged_tenants_receive_tokens_by_their_weights(bench: Bench, weight: float, share: float) -> None:
    flood(bench, tenant=b"one")
    for number in FLOOD:
        prompt = [1 + number % 90, 1 + number // 90, *range(38)]
        bench.submit(prompt, 60, request_id=1000 + number, tenant=b"two", salt=b"two", weight=weight)
    for _ in range(300):
        bench.turn()
    received = {1: 0, 2: 0}
    for (_, request_id), answer in bench.link.received.items():
        received[1 if request_id < 1000 else 2] += len(answer.token_ids)
    assert bench.scheduler.num_waiting > 100
    assert received[2] / sum(received.values()) == pytest.approx(share, abs=0.06)
    bench.close()


def test_sequence_that_loses_its_pages_to_a_newcomer_has_no_second_row_in_that_step() -> None:
    """The newcomer takes the pages of two sequences. The lesser of them would fit again in the same step."""
    bench = Bench(num_pages=400, page_size=4, max_running=8, max_batch_tokens=64)
    prompts = {number: [step * i % 97 for i in range(1, 1 + length)] for number, (step, length) in enumerate(SIZES)}
    for request_id, prompt in prompts.items():
        bench.submit(prompt, 40, request_id=request_id, tenant=b"many", salt=b"many")
    while not all(bench.received(request_id).token_ids for request_id in (0, 2, 3)):
        bench.turn()
    assert not bench.received(1).token_ids  # it wants the rest of each step
    num_pages = bench.pool.num_available + 3  # so many that the last one's do not suffice
    prompts[4] = [11 * i % 97 for i in range(1, 4 * num_pages - 2)]
    bench.submit(prompts[4], 5, request_id=4, tenant=b"few", salt=b"few")
    bench.turn()  # the harness looks for second rows
    assert bench.scheduler.num_preemptions == 2
    bench.run_dry()
    for request_id, prompt in prompts.items():
        count = 5 if request_id == 4 else 40
        assert bench.received(request_id).token_ids == expected_tokens(prompt, count, bench.vocab_size)
    bench.close()
