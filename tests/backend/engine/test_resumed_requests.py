"""Requests that an earlier backend admitted are admitted again: in their old order, before newcomers, whatever the
limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.shm.messages import FailureCode, Finish
from tests.backend.harness import Bench, expected_tokens


def order_of_first_tokens(bench: Bench, request_ids: list[int]) -> list[int]:
    """The requests in the order in which they start."""
    started: list[int] = []
    while len(started) < len(request_ids):
        bench.turn()
        started += [i for i in request_ids if bench.received(i).token_ids and i not in started]
    return started


@pytest.mark.parametrize("priority_step_s", [0.0, 3.0])
def test_resumed_requests_run_in_their_old_order_and_before_newcomers(priority_step_s: float) -> None:
    bench = Bench(max_running=1, priority_step_s=priority_step_s)
    bench.now_s = 100.0
    bench.submit([1], 2, request_id=0)
    for request_id, admitted_s in ((1, 30), (2, 10), (3, 20)):
        bench.submit([9], 2, request_id=request_id, admitted_ns=admitted_s * 10**9)
    assert order_of_first_tokens(bench, [0, 1, 2, 3]) == [2, 3, 1, 0]


def test_what_had_run_goes_before_newcomers_of_any_tenant_and_the_rest_takes_turns() -> None:
    """The tenant of what comes back has received more service than the newcomer's."""
    bench = Bench(max_running=1)
    bench.submit([1, 2, 3], 40, request_id=0, tenant=b"a")
    for _ in range(10):
        bench.turn()
    bench.submit([5], 2, request_id=1, tenant=b"b")
    for request_id, tokens in ((2, [9, 9]), (3, [8]), (4, [7, 7])):
        admitted_ns = 10 - request_id
        bench.submit(tokens, 4, request_id=request_id, tenant=b"a", num_prompt_tokens=1, admitted_ns=admitted_ns)
    # 4 and 2 had run, but no more than max_running go first; 3 had only waited.
    assert order_of_first_tokens(bench, [1, 2, 3, 4]) == [4, 1, 3, 2]


def test_flood_of_one_tenant_leaves_places_in_the_queue_to_others() -> None:
    """Each request beyond the limit leaves as much as it takes to tenants that come later."""
    bench = Bench(max_running=1, max_waiting=8)
    bench.submit([1], 90, request_id=100, tenant=b"flood")
    bench.turn()
    request_ids = iter(range(100))
    refused = []
    for tenant in (b"flood", b"b", b"c", b"d", b"e"):
        mine = [next(request_ids) for _ in range(10)]
        for request_id in mine:
            bench.submit([2, request_id], 2, request_id=request_id, tenant=tenant)
        bench.turn()
        refusals = [bench.received(i).failure for i in mine if bench.received(i).finishes == [Finish.REJECTED]]
        assert all(failure is not None and failure.limit == 8 for failure in refusals)
        refused.append(len(refusals))
    assert refused[0] == 2
    assert all(6 <= count <= 9 for count in refused[1:])
    assert bench.scheduler.num_waiting <= 16
    bench.run_dry()


def test_resumed_request_keeps_the_arrival_that_its_priority_counts_from() -> None:
    bench = Bench(max_running=1, priority_step_s=5.0)
    bench.now_s = 100.0
    bench.submit([1], 2, request_id=0, admitted_ns=90 * 10**9)
    bench.submit([1], 2, request_id=1, priority=-3)
    bench.submit([1], 2, request_id=2, priority=-1)
    assert order_of_first_tokens(bench, [0, 1, 2]) == [1, 0, 2]


def test_resumed_requests_are_refused_for_no_limit_that_they_had_passed() -> None:
    bench = Bench(max_running=1, max_waiting=1)
    limits = bench.requests.intake.limits
    bench.requests.intake.limits = replace(limits, max_open=4, max_open_resumed=8)
    for request_id in range(10):
        bench.submit([1, request_id], 3, request_id=request_id, admitted_ns=1 + request_id)
    bench.submit([1], 3, request_id=10)
    bench.run_dry()
    for request_id in range(8):
        assert bench.received(request_id).token_ids == expected_tokens([1, request_id], 3, bench.vocab_size)
    for request_id in (8, 9, 10):
        received = bench.received(request_id)
        assert received.finishes == [Finish.REJECTED]
        assert received.failure is not None
        assert received.failure.code == FailureCode.OVERLOADED


def test_false_time_of_admission_in_the_future_gains_nothing_over_true_ones() -> None:
    bench = Bench(max_running=1)
    bench.now_s = 100.0
    bench.submit([1], 2, request_id=0, admitted_ns=(1 << 63) - 1)
    bench.submit([1], 2, request_id=1, admitted_ns=50 * 10**9)
    assert order_of_first_tokens(bench, [0, 1]) == [1, 0]
