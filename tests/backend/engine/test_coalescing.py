"""Equal requests share one sequence, and a subscriber that leaves does not disturb the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.shm.link.events import FrontendDeath
from penstock.shm.messages import Finish, Sampling
from tests.backend.engine.duplicates import PROMPT, rows_for, share
from tests.backend.harness import Bench, expected_tokens


def test_equal_requests_of_two_frontends_run_once_and_each_receives_all_tokens() -> None:
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
def test_late_joiner_receives_the_past_tokens_and_then_the_rest(late: int) -> None:
    bench = Bench()
    share(bench, 0, 12)
    for _ in range(late):
        bench.turn()
    share(bench, 1, 12)
    bench.engine.turn()
    assert bench.received(1).token_ids == bench.received(0).token_ids
    bench.run_dry()
    assert bench.received(1).token_ids == expected_tokens(PROMPT, 12, bench.vocab_size)


def test_shorter_request_leaves_early_and_longer_one_goes_on() -> None:
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


def test_joiner_whose_limit_has_passed_receives_its_tokens_at_once() -> None:
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
def test_each_subscriber_stops_at_its_own_stop_tokens(capacity: int) -> None:
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


def test_joiner_after_the_executor_saw_the_stop_still_receives_the_rest() -> None:
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
def test_first_subscriber_can_leave_without_disturbing_the_others(position: int) -> None:
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


def test_sequence_ends_with_its_last_subscriber_and_a_new_request_starts_over() -> None:
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


def test_frontend_death_keeps_the_subscribers_of_other_frontends() -> None:
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
def test_only_equal_deterministic_requests_of_one_tenant_run_once(
    first: dict[str, Any], second: dict[str, Any], runs_once: bool
) -> None:
    bench = Bench()
    share(bench, 0, **first)
    share(bench, 1, **second)
    bench.run_dry()
    assert (bench.board.requests_coalesced == 1) == runs_once
    assert len(bench.received(0).token_ids) == len(bench.received(1).token_ids) == 10


def test_resumed_subscriber_receives_only_missing_tokens() -> None:
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


def test_generated_tokens_given_by_a_frontend_reach_no_other_request() -> None:
    bench = Bench()
    forged = [66, 66, 66]
    share(bench, 0, 12, frontend=1, prompt=PROMPT + forged, num_prompt_tokens=3)
    bench.turn()
    share(bench, 0, 12, frontend=2)
    bench.run_dry()
    assert bench.received(0, 2).token_ids == expected_tokens(PROMPT, 12, bench.vocab_size)


def test_duplicate_of_a_running_request_is_accepted_when_the_queue_is_full() -> None:
    bench = Bench(max_running=1, max_waiting=1)
    share(bench, 0, 30)
    bench.turn()
    bench.submit([1], 3, request_id=1)
    bench.submit([2], 3, request_id=2)
    share(bench, 3, 30)
    bench.run_dry()
    assert bench.received(2).finishes == [Finish.REJECTED]
    assert bench.received(3).token_ids == expected_tokens(PROMPT, 30, bench.vocab_size)


def test_number_of_subscribers_is_bounded_and_adds_no_rows() -> None:
    bench = Bench()
    bench.requests.intake.limits = replace(bench.requests.intake.limits, max_open=3000)
    for request_id in range(3100):
        share(bench, request_id, 5 + request_id % 7)
    bench.run_dry()
    rejected = [i for i in range(3100) if bench.received(i).finishes == [Finish.REJECTED]]
    assert rejected == list(range(3000, 3100))
    assert bench.received(6).token_ids == expected_tokens(PROMPT, 11, bench.vocab_size)
    assert bench.executor.num_rows_run == rows_for(PROMPT, 11)


def test_open_requests_of_one_tenant_leave_places_to_others() -> None:
    bench = Bench()
    bench.requests.intake.limits = replace(bench.requests.intake.limits, max_open=4)
    for request_id in range(6):
        share(bench, request_id, 5, tenant=b"flood", salt=b"same")
    for request_id in (6, 7):
        share(bench, request_id, 5, tenant=b"other", salt=b"same")
    bench.submit([1], 5, request_id=8, tenant=b"flood")
    bench.run_dry()
    rejected = [i for i in range(9) if bench.received(i).finishes == [Finish.REJECTED]]
    assert rejected == [4, 5, 8]
    bench.submit([1], 5, request_id=9, tenant=b"flood")
    bench.run_dry()
    assert bench.received(9).finishes == [Finish.LENGTH]
