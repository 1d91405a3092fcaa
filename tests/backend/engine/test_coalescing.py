"""Equal requests run once; equal prefixes are computed once; whoever leaves disturbs nobody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.shm.link.events import FrontendDeath
from penstock.shm.messages import Finish, Sampling
from tests.backend.harness import Bench, expected_tokens

PROMPT = [5, 6, 7]


def share(bench: Bench, request_id: int, max_tokens: int = 10, prompt: list[int] | None = None, **options: Any) -> None:
    bench.submit(prompt or PROMPT, max_tokens, request_id=request_id, **({"may_share": True} | options))


def rows_for(prompt: list[int], max_tokens: int) -> int:
    bench = Bench()
    bench.submit(prompt, max_tokens)
    bench.run_dry()
    return bench.executor.num_rows_run


def test_equal_requests_of_two_frontends_run_once_and_each_gets_all() -> None:
    bench = Bench()
    for frontend in (1, 2):
        for request_id in range(4):
            share(bench, request_id, frontend=frontend)
    bench.run_dry()
    expected = expected_tokens(PROMPT, 10, bench.vocab_size)
    assert all(bench.received(i, frontend).token_ids == expected for i in range(4) for frontend in (1, 2))
    assert bench.executor.num_rows_run == rows_for(PROMPT, 10)
    started = [bench.received(i, frontend).started for i in range(4) for frontend in (1, 2)]
    assert sum(s is not None and s.is_coalesced for s in started) == 7
    assert bench.board.requests_coalesced == 7


@pytest.mark.parametrize("late", range(1, 12))
def test_a_late_joiner_gets_what_has_been_and_then_the_rest(late: int) -> None:
    bench = Bench()
    share(bench, 0, 12)
    for _ in range(late):
        bench.turn()
    share(bench, 1, 12)
    bench.engine.turn()
    assert bench.received(1).token_ids == bench.received(0).token_ids
    bench.run_dry()
    assert bench.received(1).token_ids == expected_tokens(PROMPT, 12, bench.vocab_size)


def test_a_shorter_one_leaves_early_and_a_longer_one_carries_on() -> None:
    for order in ((4, 15), (15, 4)):
        bench = Bench()
        for request_id, max_tokens in enumerate(order):
            share(bench, request_id, max_tokens)
            bench.turn()
        bench.run_dry()
        for request_id, max_tokens in enumerate(order):
            received = bench.received(request_id)
            assert received.token_ids == expected_tokens(PROMPT, max_tokens, bench.vocab_size)
            assert received.finishes == [Finish.LENGTH]
        assert bench.executor.num_rows_run == rows_for(PROMPT, 15)


def test_a_joiner_whose_end_has_passed_gets_its_part_at_once() -> None:
    bench = Bench()
    share(bench, 0, 20)
    for _ in range(9):
        bench.turn()
    share(bench, 1, 3)
    bench.engine.turn()
    assert bench.received(1).token_ids == expected_tokens(PROMPT, 3, bench.vocab_size)
    assert bench.received(1).finishes == [Finish.LENGTH]
    bench.run_dry()


@pytest.mark.parametrize("capacity", [0, 1, 3])
def test_stop_tokens_are_each_subscribers_own(capacity: int) -> None:
    tokens = expected_tokens(PROMPT, 15, 97)
    stop = next(token for token in tokens[4:] if token not in tokens[:4])
    for stopper_first in (True, False):
        bench = Bench(capacity=capacity)
        stop_ids = ((stop,), ()) if stopper_first else ((), (stop,))
        share(bench, 0, 15, stop_ids=stop_ids[0])
        bench.turn()
        share(bench, 1, 15, stop_ids=stop_ids[1])
        bench.run_dry()
        stopper, other = (0, 1) if stopper_first else (1, 0)
        assert bench.received(stopper).token_ids == tokens[: tokens.index(stop) + 1]
        assert bench.received(stopper).finishes == [Finish.STOP]
        assert bench.received(other).token_ids == tokens


def test_who_joins_while_the_executor_has_seen_the_end_still_gets_the_rest() -> None:
    """The device has sampled the leader's stop token, and the loop does not know yet."""
    tokens = expected_tokens(PROMPT, 15, 97)
    for steps_ahead in (1, 2, 3):
        bench = Bench(capacity=3)
        share(bench, 0, 15, stop_ids=(tokens[3],))
        while len(bench.received(0).token_ids) < 3 - steps_ahead:
            bench.turn()
        for _ in range(steps_ahead + 1):
            bench.executor.run_one()
        share(bench, 1, 15)
        bench.run_dry()
        assert bench.received(0).token_ids == tokens[: tokens.index(tokens[3]) + 1]
        assert bench.received(1).token_ids == tokens


@pytest.mark.parametrize("position", range(0, 10, 3))
def test_the_leaders_leaving_disturbs_nobody(position: int) -> None:
    bench = Bench()
    for request_id in range(8):
        share(bench, request_id, 10)
    for _ in range(position):
        bench.turn()
    bench.cancel(0)
    bench.cancel(3)
    bench.run_dry()
    expected = expected_tokens(PROMPT, 10, bench.vocab_size)
    assert all(bench.received(i).token_ids == expected for i in (1, 2, 4, 5, 6, 7))
    assert bench.executor.num_rows_run == rows_for(PROMPT, 10)
    assert bench.pool.num_held == 0


def test_when_the_last_listener_leaves_the_sequence_ends_and_a_newcomer_starts_anew() -> None:
    bench = Bench()
    share(bench, 0)
    share(bench, 1)
    for _ in range(3):
        bench.turn()
    bench.cancel(0)
    bench.cancel(1)
    share(bench, 2)
    bench.engine.turn()
    bench.engine.check_integrity()
    bench.run_dry()
    assert bench.received(2).token_ids == expected_tokens(PROMPT, 10, bench.vocab_size)
    started = bench.received(2).started
    assert started is not None
    assert not started.is_coalesced


def test_a_frontends_death_leaves_the_other_frontends_subscribers() -> None:
    bench = Bench()
    share(bench, 0, frontend=1)
    share(bench, 0, frontend=2)
    for _ in range(4):
        bench.turn()
    bench.link.arrivals.append(FrontendDeath(1))
    bench.link.dead.add(1)
    bench.run_dry()
    assert bench.received(0, 2).token_ids == expected_tokens(PROMPT, 10, bench.vocab_size)


SEEDED = Sampling(temperature=20.0, seed=5)


@pytest.mark.parametrize(
    ("first", "second", "runs_once"),
    [
        ({}, {}, True),
        ({"sampling": SEEDED}, {"sampling": SEEDED}, True),
        ({"sampling": Sampling(temperature=0.0, seed=1, top_k=3)}, {"sampling": Sampling(temperature=0.0)}, True),
        ({"sampling": SEEDED}, {"sampling": Sampling(temperature=20.0, seed=6)}, False),
        ({}, {"sampling": Sampling(temperature=0.0, presence_penalty=1.0)}, False),
        ({"salt": b"a"}, {"salt": b"b"}, False),
        ({}, {"may_share": False}, False),
        ({"may_share": False}, {"may_share": False}, False),
        ({}, {"prompt": [5, 6, 8]}, False),
    ],
)
def test_only_what_is_equal_and_determined_and_of_one_tenant_runs_once(
    first: dict[str, Any], second: dict[str, Any], runs_once: bool
) -> None:
    bench = Bench()
    share(bench, 0, **first)
    share(bench, 1, **second)
    bench.run_dry()
    assert (bench.board.requests_coalesced == 1) == runs_once
    assert len(bench.received(0).token_ids) == len(bench.received(1).token_ids) == 10


def test_a_resumed_listener_gets_only_what_it_has_not_had() -> None:
    bench = Bench()
    whole = expected_tokens(PROMPT, 12, bench.vocab_size)
    share(bench, 0, 12)
    share(bench, 1, 12, prompt=PROMPT + whole[:6], num_prompt_tokens=3)
    for _ in range(9):
        bench.turn()
    share(bench, 2, 12, prompt=PROMPT + whole[:2], num_prompt_tokens=3)
    bench.run_dry()
    assert bench.received(0).token_ids == whole
    assert bench.received(1).token_ids == whole[6:]
    assert bench.received(2).token_ids == whole[2:]
    assert bench.executor.num_rows_run == rows_for(PROMPT, 12)


# Prefixes

PREFIX = [number % 90 for number in range(40)]


def computed_tokens(bench: Bench) -> int:
    return sum(batch.num_tokens for batch in bench.executor.batches)


def test_a_finished_requests_pages_are_found_again() -> None:
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


def test_an_identical_prompt_still_computes_its_last_token() -> None:
    bench = Bench(page_size=4)
    for request_id in range(2):
        bench.submit(PREFIX, 6, request_id=request_id)
        bench.run_dry()
    started = bench.received(1).started
    assert started is not None
    assert started.cached_tokens == 39
    assert bench.received(1).token_ids == bench.received(0).token_ids


def test_generated_pages_are_found_again_too() -> None:
    bench = Bench(page_size=4)
    bench.submit([1, 2, 3], 30)
    bench.run_dry()
    tokens = bench.received().token_ids
    bench.submit([1, 2, 3, *tokens, 9], 4, request_id=1)
    bench.run_dry()
    started = bench.received(1).started
    assert started is not None
    assert started.cached_tokens == 32


def test_a_cancelled_requests_pages_stay_reusable() -> None:
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


def test_a_shared_prefix_that_arrives_together_is_computed_once() -> None:
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
def test_a_prefix_that_ends_within_a_page_is_computed_once(page_size: int, max_batch_tokens: int) -> None:
    """But for less than an eighth of a page, for which nobody waits a step."""
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


def test_a_page_that_a_running_sequence_decodes_into_is_copied_as_far_as_it_is_computed() -> None:
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
    assert started.cached_tokens == 3 + 5  # the KV of the last one was computed by the step just applied
    assert bench.received(1).token_ids == expected_tokens(prompt, 4, bench.vocab_size)


def test_a_conversation_goes_on_within_the_page_in_which_the_last_answer_ended() -> None:
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


def test_a_page_copy_goes_with_its_row_when_that_is_dropped() -> None:
    bench = Bench(page_size=16, capacity=1)
    bench.submit([1, 2, 3, 4], 2)
    bench.run_dry()
    bench.submit([1, 2, 3, 5], 8, request_id=1)
    bench.submit([1, 2, 3, 6], 8, request_id=2)
    bench.engine.turn()
    assert len(bench.executor.batches[-1].page_copies) == 0  # a plan behind it has nothing to copy
    planned = next(batch for batch in bench.executor.batches if batch.page_copies)
    assert [destination for _, destination in planned.page_copies] == planned.page_table[:, 0].tolist()
    plan, *_ = bench.executor._plans[0]
    kept = plan.keep([1])
    assert list(kept.page_copies.values()) == [planned.page_copies[1]]
    bench.cancel(1)
    bench.run_dry()
    assert bench.received(2).token_ids == expected_tokens([1, 2, 3, 6], 8, bench.vocab_size)


def test_an_idle_page_that_is_to_be_copied_yields_where_the_last_pages_are_needed() -> None:
    """Four pages: two full ones that are found, one to copy from, and two to fill would be one too many."""
    bench = Bench(num_pages=4, page_size=4)
    bench.submit([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 1)
    bench.run_dry()
    assert bench.pool.num_idle == 3
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13]
    bench.submit(prompt, 4, request_id=1)
    bench.run_dry()
    assert bench.received(1).token_ids == expected_tokens(prompt, 4, bench.vocab_size)


def test_pages_that_others_hold_are_no_bar_to_who_shares_them() -> None:
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
def test_who_waits_for_a_prefix_goes_on_when_the_one_computing_it_is_cancelled(turns: int) -> None:
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
def test_who_waits_for_a_prefix_that_gets_no_further_computes_it(max_park_steps: int) -> None:
    """The device does not answer: the leader is planned to its end, and another stream is planned on and on."""
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


def test_who_waits_for_a_prefix_that_gets_on_does_so_for_as_long_as_it_takes() -> None:
    bench = Bench(num_pages=200, page_size=4, max_batch_tokens=5, max_park_steps=2)
    for request_id in range(3):
        bench.submit([*PREFIX, request_id, 9], 1, request_id=request_id)
    bench.run_dry()
    assert computed_tokens(bench) == len(PREFIX) + 3 * 2


def test_non_deterministic_duplicates_share_the_prefill_and_differ_in_their_tokens() -> None:
    bench = Bench(num_pages=200, page_size=4, max_running=8)
    for request_id in range(6):
        sampling = Sampling(temperature=50.0, seed=request_id)
        bench.submit(PREFIX, 8, request_id=request_id, sampling=sampling)
    bench.run_dry()
    assert len({tuple(bench.received(request_id).token_ids) for request_id in range(6)}) == 6
    # Of the prompt each but the first computes the last token, for the sake of its logits.
    assert computed_tokens(bench) == len(PREFIX) + 5 + 6 * 7


# Deadlines and priorities


def test_a_request_expires_in_the_queue_in_prefill_and_in_decode() -> None:
    bench = Bench(max_running=2, max_batch_tokens=8, num_pages=100)
    bench.submit([1], 60, request_id=0, timeout_ms=1000)
    bench.submit([2] * 90, 5, request_id=1, timeout_ms=1000)
    bench.submit([3], 5, request_id=2, timeout_ms=1000)
    bench.submit([4], 5, request_id=3)
    for _ in range(3):
        bench.turn()
    assert bench.received(0).token_ids
    assert not bench.received(1).token_ids
    bench.now_s = 1.0
    bench.engine.turn()
    assert [bench.received(i).finishes for i in range(4)] == [[Finish.EXPIRED]] * 3 + [[]]
    rows = bench.executor.num_rows_run
    bench.run_dry()
    assert bench.executor.num_rows_run - rows == 5
    assert bench.received(3).token_ids == expected_tokens([4], 5, bench.vocab_size)
    assert bench.board.requests_expired == 3


def test_an_expired_subscriber_leaves_the_others_of_its_sequence() -> None:
    bench = Bench()
    share(bench, 0, timeout_ms=500)
    share(bench, 1)
    bench.turn()
    bench.turn()
    bench.now_s = 0.5
    bench.run_dry()
    assert bench.received(0).finishes == [Finish.EXPIRED]
    assert bench.received(1).token_ids == expected_tokens(PROMPT, 10, bench.vocab_size)


def first_of(bench: Bench, request_ids: range) -> list[int]:
    """The order in which requests got their first token."""
    order: list[int] = []
    while len(order) < len(request_ids):
        bench.turn()
        order += [i for i in request_ids if bench.received(i).token_ids and i not in order]
    bench.run_dry()
    return order


def test_priorities_are_ignored_by_default_and_bound_by_the_time_waited_otherwise() -> None:
    for step_s, expected in ((0.0, [0, 1, 2, 3]), (10.0, [0, 3, 1, 2])):
        bench = Bench(max_running=1, priority_step_s=step_s)
        bench.submit([1], 3, request_id=0, priority=0)
        bench.submit([2], 3, request_id=1, priority=0)
        bench.turn()
        bench.now_s = 5.0
        bench.submit([3], 3, request_id=2, priority=0)
        bench.submit([4], 3, request_id=3, priority=-1)
        assert first_of(bench, range(4)) == expected
    bench = Bench(max_running=1, priority_step_s=10.0)
    bench.submit([1], 3, request_id=0)
    bench.submit([2], 3, request_id=1)
    bench.turn()
    bench.now_s = 11.0
    bench.submit([3], 3, request_id=2, priority=-1)
    assert first_of(bench, range(3)) == [0, 1, 2]


def test_the_lowest_priority_is_preempted_first() -> None:
    bench = Bench(num_pages=8, page_size=4, max_context=30, priority_step_s=10.0)
    bench.submit([1] * 9, 14, request_id=0, priority=5)
    bench.submit([2] * 9, 14, request_id=1)
    bench.turn()
    while not bench.board.preemptions:
        bench.turn()
    assert bench.scheduler.num_running == 1
    before = len(bench.received(1).token_ids)
    bench.turn()
    bench.turn()
    assert len(bench.received(1).token_ids) > before
    bench.run_dry()
    for request_id, token in ((0, 1), (1, 2)):
        assert bench.received(request_id).token_ids == expected_tokens([token] * 9, 14, bench.vocab_size)


def test_tokens_that_a_frontend_brings_along_are_told_to_nobody_else() -> None:
    bench = Bench()
    forged = [66, 66, 66]
    share(bench, 0, 12, frontend=1, prompt=PROMPT + forged, num_prompt_tokens=3)
    bench.turn()
    share(bench, 0, 12, frontend=2)
    bench.run_dry()
    assert bench.received(0, 2).token_ids == expected_tokens(PROMPT, 12, bench.vocab_size)


def test_an_urgent_duplicate_does_not_wait_behind_a_patient_one() -> None:
    bench = Bench(max_running=1, priority_step_s=10.0)
    bench.submit([1], 6, request_id=0)
    bench.turn()
    share(bench, 1, 4, priority=100)
    bench.submit([2], 4, request_id=2)
    share(bench, 3, 4, priority=-100)
    assert first_of(bench, range(4)) == [0, 3, 2, 1]


def test_a_duplicate_of_a_running_request_is_taken_on_though_the_queue_is_full() -> None:
    bench = Bench(max_running=1, max_waiting=1)
    share(bench, 0, 30)
    bench.turn()
    bench.submit([1], 3, request_id=1)
    bench.submit([2], 3, request_id=2)
    share(bench, 3, 30)
    bench.run_dry()
    assert bench.received(2).finishes == [Finish.REJECTED]
    assert bench.received(3).token_ids == expected_tokens(PROMPT, 30, bench.vocab_size)


def test_listeners_are_bounded_and_their_number_costs_no_more_than_itself() -> None:
    bench = Bench()
    bench.requests.intake.limits = replace(bench.requests.intake.limits, max_open=3000)
    for request_id in range(3100):
        share(bench, request_id, 5 + request_id % 7)
    bench.run_dry()
    rejected = [i for i in range(3100) if bench.received(i).finishes == [Finish.REJECTED]]
    assert rejected == list(range(3000, 3100))
    assert bench.received(6).token_ids == expected_tokens(PROMPT, 11, bench.vocab_size)
    assert bench.executor.num_rows_run == rows_for(PROMPT, 11)


def test_a_fault_in_taking_one_request_on_fails_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.submit([1, 2], 8, request_id=0)
    bench.turn()
    with monkeypatch.context() as planted:
        planted.setattr(bench.requests.intake, "find_refusal", lambda _submission: 1 / 0)
        bench.submit([3], 8, request_id=1)
        bench.engine.turn()
    bench.run_dry()
    assert bench.received(1).finishes == [Finish.FAILED]
    assert bench.received(0).token_ids == expected_tokens([1, 2], 8, bench.vocab_size)
