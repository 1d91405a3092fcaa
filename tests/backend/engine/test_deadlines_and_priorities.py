"""Deadlines end requests in every state, and priorities order the wait queue."""

from __future__ import annotations

from penstock.shm.messages import Finish
from tests.backend.engine.duplicates import PROMPT, share
from tests.backend.harness import Bench, expected_tokens


def test_request_expires_in_the_queue_in_prefill_and_in_decode() -> None:
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


def test_expired_subscriber_leaves_the_others_of_its_sequence_running() -> None:
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


def test_priorities_are_ignored_by_default_and_limited_by_waiting_time_otherwise() -> None:
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


def test_lowest_priority_is_preempted_first() -> None:
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


def test_urgent_duplicate_does_not_wait_behind_one_of_low_priority() -> None:
    bench = Bench(max_running=1, priority_step_s=10.0)
    bench.submit([1], 6, request_id=0)
    bench.turn()
    share(bench, 1, 4, priority=100)
    bench.submit([2], 4, request_id=2)
    share(bench, 3, 4, priority=-100)
    assert first_of(bench, range(4)) == [0, 3, 2, 1]
