"""The engine with the fake pass: each stream is what the pass defines, ends when it should, and frees its pages."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from penstock.backend.scheduling.preemption import Preemption
from penstock.backend.scheduling.wait_queue import WaitQueue
from penstock.backend.sequences.sequence import Sequence
from penstock.shm.link.events import FrontendDeath
from penstock.shm.memory.board import BackendBoard
from penstock.shm.messages import FailureCode, Finish, Sampling
from tests.backend.harness import Bench, expected_tokens


@pytest.mark.parametrize("capacity", [0, 1, 2, 5])
@pytest.mark.parametrize("max_batch_tokens", [1, 7, 64])
def test_stream_is_what_the_pass_defines_for_any_chunks_and_capacity(capacity: int, max_batch_tokens: int) -> None:
    bench = Bench(capacity=capacity, max_batch_tokens=max_batch_tokens)
    prompts = [[3, 1, 4], list(range(30)), [9] * 17, [5]]
    for request_id, prompt in enumerate(prompts):
        bench.submit(prompt, 9, request_id=request_id)
    bench.run_dry()
    for request_id, prompt in enumerate(prompts):
        received = bench.received(request_id)
        assert received.token_ids == expected_tokens(prompt, 9, bench.vocab_size)
        assert received.finishes == [Finish.LENGTH]
        assert received.started is not None
    assert bench.pool.num_held == 0


def test_stop_token_ends_the_stream_and_the_row_already_planned_is_dropped() -> None:
    bench = Bench(capacity=1)
    prompt = [2, 7]
    tokens = expected_tokens(prompt, 12, bench.vocab_size)
    bench.submit(prompt, 12, stop_ids=(tokens[4],))
    bench.run_dry()
    received = bench.received()
    assert received.token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert received.finishes == [Finish.STOP]
    assert bench.executor.num_rows_run == len(received.token_ids)


def test_request_cancelled_between_plan_and_launch_costs_no_tokens() -> None:
    for capacity in (1, 2, 4):
        bench = Bench(capacity=capacity)
        bench.submit([1, 2, 3], 50)
        bench.turn()
        assert bench.executor.num_planned == capacity + 1
        bench.cancel()
        bench.engine.turn()
        assert bench.pool.num_held == 0
        bench.run_dry()
        assert bench.executor.num_rows_run == 0
        assert bench.received().token_ids == []


def test_request_that_cannot_be_queued_fails_and_leaves_no_count(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(max_running=1)
    bench.submit([1], 50)
    bench.turn()
    with monkeypatch.context() as patch:
        patch.setattr(WaitQueue, "floor", lambda _queue: 1 / 0)
        bench.submit([1, 2, 3], 50, request_id=1)
        bench.turn()
    failure = bench.received(1).failure
    assert failure is not None
    assert failure.code is FailureCode.INTERNAL
    assert bench.scheduler.num_waiting == 0
    bench.scheduler.check_integrity()
    bench.submit([1, 2, 3], 5, request_id=2)
    bench.turn()
    assert bench.scheduler.num_waiting == 1
    bench.run_dry()
    assert bench.received(2).finishes == [Finish.LENGTH]


def test_board_counts_computed_and_wasted_tokens() -> None:
    bench = Bench(capacity=4)
    bench.submit([1, 2, 3], 6)
    bench.run_dry()
    assert (bench.board.computed_tokens, bench.board.wasted_tokens) == (3 + 5, 0)
    bench.submit([4] * 10, 50)
    bench.turn()
    bench.executor.run_one()  # the client leaves while the step runs
    bench.cancel()
    bench.engine.turn()
    bench.run_dry()
    assert (bench.board.computed_tokens, bench.board.wasted_tokens) == (8 + 10, 10)


def test_cancelling_twice_or_an_unknown_id_is_normal() -> None:
    bench = Bench()
    bench.cancel(77)
    bench.submit([1], 5)
    bench.turn()
    bench.cancel()
    bench.cancel()
    bench.cancel(frontend=9)
    bench.run_dry()
    assert bench.board.requests_cancelled == 1
    assert bench.pool.num_held == 0


@pytest.mark.parametrize("turns", range(9))
def test_cancelled_request_frees_its_pages_at_the_next_turn_in_any_state(turns: int) -> None:
    """Waiting, in prefill, in decode, planned: two slots, long prompts, and requests that queue behind them."""
    bench = Bench(max_running=2, max_batch_tokens=5)
    for request_id in range(4):
        bench.submit([request_id] * 12, 20, request_id=request_id)
    for _ in range(turns):
        bench.turn()
    for request_id in range(4):
        bench.cancel(request_id)
    bench.engine.turn()
    assert bench.pool.num_held == 0
    assert bench.requests.table.num_open == 0
    bench.engine.check_integrity()


def test_frontend_death_ends_its_requests_and_no_others() -> None:
    bench = Bench()
    bench.submit([1, 2], 10, frontend=1)
    bench.submit([1, 2], 10, frontend=2)
    for _ in range(3):
        bench.turn()
    bench.link.arrivals.append(FrontendDeath(1))
    bench.link.dead.add(1)
    bench.run_dry()
    assert bench.received(frontend=2).token_ids == expected_tokens([1, 2], 10, bench.vocab_size)
    assert bench.pool.num_held == 0


@pytest.mark.parametrize("capacity", [0, 1, 2, 4])
def test_no_sequence_is_preempted_before_one_of_its_steps_is_applied(
    capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its computed tokens would be lost: no page of an unapplied step can be found."""
    num_applied: list[int] = []
    preempt = Preemption.preempt

    def note_applied(preemption: Preemption, sequence: Sequence) -> None:
        num_applied.append(sequence.num_applied)
        preempt(preemption, sequence)

    monkeypatch.setattr(Preemption, "preempt", note_applied)
    for seed in range(12):
        rng = Random(seed)
        bench = Bench(num_pages=rng.randint(8, 14), page_size=rng.randint(1, 4), capacity=capacity)
        longest = min(20, bench.pool.num_pages * bench.page_size // 2)
        for request_id in range(12):
            prompt = [request_id, *(rng.randrange(97) for _ in range(rng.randrange(longest)))]
            bench.submit(prompt, longest - rng.randrange(longest), request_id=request_id)
            for _ in range(rng.randrange(3)):
                bench.turn()
        bench.run_dry()
    assert len(num_applied) > 20
    assert min(num_applied) > 0


def test_newest_is_preempted_when_pages_run_out_and_still_receives_the_same_tokens() -> None:
    bench = Bench(num_pages=8, page_size=4, max_context=30)
    prompts = [[1] * 9, [2] * 9, [3] * 9]
    for request_id, prompt in enumerate(prompts):
        bench.submit(prompt, 14, request_id=request_id)
    bench.run_dry()
    assert bench.board.preemptions > 0
    assert sum(received.num_preemptions for received in bench.link.received.values()) == bench.board.preemptions
    buckets, num_rows = BackendBoard.step_rows.read(bench.board.values())
    assert (sum(buckets), num_rows) == (bench.board.steps, bench.executor.num_rows_run)
    for request_id, prompt in enumerate(prompts):
        assert bench.received(request_id).token_ids == expected_tokens(prompt, 14, bench.vocab_size)


def test_decodes_go_on_while_a_long_prompt_is_prefilled() -> None:
    bench = Bench(max_batch_tokens=8)
    bench.submit([1], 40)
    for _ in range(4):
        bench.turn()
    bench.submit([2] * 60, 3, request_id=1)
    while not bench.received(1).token_ids:
        before = len(bench.received().token_ids)
        bench.turn()
        assert len(bench.received().token_ids) == before + 1
    assert max(batch.num_tokens for batch in bench.executor.batches) == 8
    bench.run_dry()


def test_rows_of_one_token_come_first_and_budgets_hold() -> None:
    bench = Bench(max_batch_tokens=10, max_running=4)
    for request_id in range(9):
        bench.submit([request_id] * (1 + 5 * request_id), 6, request_id=request_id)
    bench.run_dry()
    for batch in bench.executor.batches:
        lengths = np.diff(batch.query_starts).tolist()
        assert sum(lengths) <= 10
        assert len(lengths) <= 4
        assert lengths == sorted(lengths, key=lambda n: n > 1)


def test_resumed_stream_continues_where_it_stopped() -> None:
    prompt = [4, 8, 15]
    bench = Bench()
    whole = expected_tokens(prompt, 12, bench.vocab_size)
    bench.submit(prompt + whole[:5], 12, num_prompt_tokens=len(prompt))
    bench.submit(prompt + whole, 12, num_prompt_tokens=len(prompt), request_id=1)
    bench.run_dry()
    assert bench.received().token_ids == whole[5:]
    assert bench.received(1).token_ids == []
    assert bench.received(1).finishes == [Finish.LENGTH]


@pytest.mark.parametrize(
    ("submission", "code", "limit"),
    [
        ({"prompt": [1] * 300}, FailureCode.CONTEXT_TOO_LONG, 256),
        ({"prompt": [1, 97]}, FailureCode.BAD_TOKEN, 97),
        ({"prompt": [1, -5]}, FailureCode.BAD_TOKEN, 97),
        ({"prompt": [1], "sampling": Sampling(logit_bias=((97, 1.0),))}, FailureCode.BAD_TOKEN, 97),
        ({"prompt": [1], "num_prompt_tokens": 2}, FailureCode.CONTEXT_TOO_LONG, 256),
    ],
)
def test_invalid_submission_is_refused_and_others_go_on(submission: dict[str, object], code: int, limit: int) -> None:
    bench = Bench()
    bench.submit([6, 6], 5, request_id=1)
    bench.submit(**submission)  # type: ignore[arg-type]
    bench.run_dry()
    failure = bench.received().failure
    assert failure is not None
    assert (failure.code, failure.limit) == (code, limit)
    assert bench.received().finishes == [Finish.REJECTED]
    assert bench.received(1).token_ids == expected_tokens([6, 6], 5, bench.vocab_size)


def test_full_queue_and_draining_engine_refuse_requests() -> None:
    bench = Bench(max_running=1, max_waiting=2)
    for request_id in range(4):
        bench.submit([1], 5, request_id=request_id)
    bench.turn()
    bench.engine.drain(1000.0)
    bench.submit([1], 5, request_id=9)
    bench.run_dry()
    codes = [failure.code if (failure := bench.received(i).failure) else None for i in (0, 1, 2, 3, 9)]
    assert codes == [None, None, None, FailureCode.OVERLOADED, FailureCode.SHUTTING_DOWN]


def test_seeded_sampling_gives_the_same_tokens_alone_and_in_a_batch() -> None:
    sampling = Sampling(temperature=30.0, seed=1234, presence_penalty=1.0)
    alone = Bench()
    alone.submit([7, 7], 12, sampling=sampling)
    alone.run_dry()
    crowded = Bench(num_pages=12, max_batch_tokens=5)
    for request_id in range(1, 6):
        crowded.submit([request_id] * 6, 10, request_id=request_id, sampling=Sampling(seed=request_id))
    crowded.submit([7, 7], 12, sampling=sampling)
    crowded.run_dry()
    assert crowded.received().token_ids == alone.received().token_ids
    assert alone.received().token_ids != expected_tokens([7, 7], 12, alone.vocab_size)
