"""The engine against the fake pass's definition: what is streamed, when it ends, and that all comes back."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.backend.engine.executor import ExecutorFailed
from penstock.backend.engine.intake import EngineLimits
from penstock.backend.passes.fake import FakePass
from penstock.backend.scheduling.scheduler import Scheduler
from penstock.backend.sequences.sequence import Sequence
from penstock.shm.link.events import FrontendDeath
from penstock.shm.memory.board import BackendBoard
from penstock.shm.messages import FailureCode, Finish, Sampling
from tests.backend.harness import Bench, expected_tokens


@pytest.mark.parametrize("capacity", [0, 1, 2, 5])
@pytest.mark.parametrize("max_batch_tokens", [1, 7, 64])
def test_a_stream_is_what_the_pass_defines_whatever_the_chunks_and_the_capacity(
    capacity: int, max_batch_tokens: int
) -> None:
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


def test_a_stop_token_ends_the_stream_and_the_row_already_planned_costs_nothing() -> None:
    bench = Bench(capacity=1)
    prompt = [2, 7]
    tokens = expected_tokens(prompt, 12, bench.vocab_size)
    bench.submit(prompt, 12, stop_ids=(tokens[4],))
    bench.run_dry()
    received = bench.received()
    assert received.token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert received.finishes == [Finish.STOP]
    assert bench.executor.num_rows_run == len(received.token_ids)


def test_a_request_cancelled_between_plan_and_launch_costs_no_tokens() -> None:
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


def test_the_board_tells_what_was_computed_and_what_of_it_was_for_nobody() -> None:
    bench = Bench(capacity=4)
    bench.submit([1, 2, 3], 6)
    bench.run_dry()
    assert (bench.board.computed_tokens, bench.board.wasted_tokens) == (3 + 5, 0)
    bench.submit([4] * 10, 50)
    bench.turn()
    bench.executor.run_one()  # its client goes while the step runs
    bench.cancel()
    bench.engine.turn()
    bench.run_dry()
    assert (bench.board.computed_tokens, bench.board.wasted_tokens) == (8 + 10, 10)


def test_cancelling_twice_or_what_is_unknown_is_normal() -> None:
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
def test_a_cancel_in_any_state_frees_pages_at_the_next_turn(turns: int) -> None:
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


def test_a_frontends_death_ends_its_requests_and_no_others() -> None:
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
def test_nobody_is_preempted_before_a_step_of_theirs_was_applied(
    capacity: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it had computed would be lost: nothing of it is known to be there."""
    num_applied: list[int] = []
    preempt = Scheduler._preempt

    def note_applied(scheduler: Scheduler, sequence: Sequence) -> None:
        num_applied.append(sequence.num_applied)
        preempt(scheduler, sequence)

    monkeypatch.setattr(Scheduler, "_preempt", note_applied)
    for seed in range(30):
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


def test_when_pages_are_short_the_newest_is_preempted_and_still_gets_the_same_tokens() -> None:
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


def test_a_resumed_stream_goes_on_where_it_was() -> None:
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
def test_what_would_harm_the_engine_is_refused_alone(submission: dict[str, object], code: int, limit: int) -> None:
    bench = Bench()
    bench.submit([6, 6], 5, request_id=1)
    bench.submit(**submission)  # type: ignore[arg-type]
    bench.run_dry()
    failure = bench.received().failure
    assert failure is not None
    assert (failure.code, failure.limit) == (code, limit)
    assert bench.received().finishes == [Finish.REJECTED]
    assert bench.received(1).token_ids == expected_tokens([6, 6], 5, bench.vocab_size)


def test_a_full_queue_and_a_draining_engine_refuse() -> None:
    bench = Bench(max_running=1, max_waiting=2)
    for request_id in range(4):
        bench.submit([1], 5, request_id=request_id)
    bench.turn()
    bench.engine.drain(1000.0)
    bench.submit([1], 5, request_id=9)
    bench.run_dry()
    codes = [failure.code if (failure := bench.received(i).failure) else None for i in (0, 1, 2, 3, 9)]
    assert codes == [None, None, None, FailureCode.OVERLOADED, FailureCode.SHUTTING_DOWN]


class FaultyPass(FakePass):
    """Raises, or gives logits that are not finite, for tokens that say so."""

    def forward(self, batch):  # type: ignore[no-untyped-def]
        if 90 in batch.input_ids:
            raise ArithmeticError("planted")
        logits = super().forward(batch)
        for index, row in enumerate(batch.logit_rows):
            if 91 in batch.input_ids[batch.query_starts[row] : batch.query_starts[row + 1]]:
                logits[index, 3] = np.nan
        return logits


def test_logits_that_are_not_finite_fail_their_own_request_only() -> None:
    bench = Bench(forward_pass=FaultyPass(90, 8), vocab_size=90)
    bench.requests.intake.limits = EngineLimits(97, 256, 10)
    bench.submit([1, 91], 5)
    bench.submit([1, 2], 5, request_id=1)
    bench.run_dry()
    assert bench.received().finishes == [Finish.FAILED]
    assert bench.received(1).token_ids == expected_tokens([1, 2], 5, 90)


def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on() -> None:
    bench = Bench(forward_pass=FaultyPass(90, 8), vocab_size=90)
    bench.requests.intake.limits = EngineLimits(97, 256, 10)
    bench.submit([1, 90], 5)
    bench.run_dry()
    assert bench.received().finishes == [Finish.FAILED]
    bench.submit([1, 2], 5, request_id=1)
    bench.run_dry()
    assert bench.received(1).token_ids == expected_tokens([1, 2], 5, 90)
    assert bench.pool.num_held == 0


def test_a_step_that_raises_fails_the_guilty_request_and_who_shared_the_step_goes_on() -> None:
    bench = Bench(forward_pass=FaultyPass(90, 8), vocab_size=90, max_batch_tokens=64)
    bench.requests.intake.limits = EngineLimits(97, 256, 10)
    for request_id in range(4):
        bench.submit([1, request_id], 5, request_id=request_id)
    bench.turn()
    bench.submit([1, 90], 5, request_id=9)
    bench.submit([7, 8, 9], 5, request_id=10)
    bench.run_dry()
    assert bench.received(9).finishes == [Finish.FAILED]
    assert bench.board.requests_failed == 1
    for request_id in range(4):
        assert bench.received(request_id).token_ids == expected_tokens([1, request_id], 5, 90)
    assert bench.received(10).token_ids == expected_tokens([7, 8, 9], 5, 90)
    assert bench.pool.num_held == 0


class PassingFault(FakePass):
    """Raises in the steps of these numbers, before or after it has sampled."""

    def __init__(self, steps: set[int], *, is_late: bool, vocab_size: int = 97) -> None:
        super().__init__(vocab_size, 8)
        self.steps = steps
        self.is_late = is_late
        self.num_steps = 0

    def sample(self, logits, batch, masks=None):  # type: ignore[no-untyped-def]
        self.num_steps += 1
        if self.num_steps in self.steps and not self.is_late:
            raise ArithmeticError("planted")
        output = super().sample(logits, batch, masks)
        if self.num_steps in self.steps:
            raise ArithmeticError("planted")
        return output


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("capacity", [0, 1, 3])
@pytest.mark.parametrize("steps", [{1}, {3}, {4, 5}, {2, 6, 7}])
def test_a_fault_that_passes_costs_nobody_anything(steps: set[int], capacity: int, is_late: bool) -> None:
    bench = Bench(forward_pass=PassingFault(steps, is_late=is_late), capacity=capacity, max_batch_tokens=12)
    sampling = Sampling(temperature=30.0, seed=5, presence_penalty=1.0)
    alone = Bench()
    alone.submit([9, 8, 7], 9, sampling=sampling)
    alone.run_dry()
    prompts = [[request_id] * 7 for request_id in range(4)]
    for request_id, prompt in enumerate(prompts):
        bench.submit(prompt, 9, request_id=request_id)
    bench.submit([9, 8, 7], 9, request_id=9, sampling=sampling)
    bench.run_dry()
    for request_id, prompt in enumerate(prompts):
        assert bench.received(request_id).token_ids == expected_tokens(prompt, 9, bench.vocab_size)
    assert bench.received(9).token_ids == alone.received().token_ids
    assert bench.board.requests_failed == 0


def test_when_sixteen_steps_in_a_row_have_failed_the_process_ends() -> None:
    bench = Bench(forward_pass=PassingFault(set(range(1, 99)), is_late=False))
    for request_id in range(12):
        bench.submit([request_id, 1], 5, request_id=request_id)
    with pytest.raises(ExecutorFailed, match="16 steps in a row"):
        bench.run_dry()
    assert bench.forward_pass.num_steps == 16


@pytest.mark.parametrize("part", ["build", "note_computed", "deliver"])
def test_a_fault_of_ours_on_one_request_fails_that_request_alone(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    owner = {"build": bench.engine._builder, "note_computed": bench.scheduler, "deliver": bench.requests.delivery}[part]
    original = getattr(owner, part)

    def broken(subject: Any, *args: Any) -> Any:
        sequences = subject.sequences if part == "build" else [subject]
        if any(sequence.tokens[0] == 66 for sequence in sequences):
            raise LookupError("planted")
        return original(subject, *args)

    monkeypatch.setattr(owner, part, broken)
    for request_id, first in enumerate((11, 66, 12)):
        bench.submit([first, 2, 3, 4], 6, request_id=request_id)
    bench.run_dry()
    failure = bench.received(1).failure
    assert failure is not None
    assert failure.code == FailureCode.INTERNAL
    assert bench.received(1).finishes == [Finish.FAILED]
    for request_id, first in ((0, 11), (2, 12)):
        assert bench.received(request_id).token_ids == expected_tokens([first, 2, 3, 4], 6, bench.vocab_size)
    assert bench.pool.num_held == 0


def test_seeded_sampling_gives_the_same_tokens_alone_and_among_others() -> None:
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


class EngineMachine(RuleBasedStateMachine):
    """Any order of submissions, cancels, deaths, steps and turns, with few pages: every survivor's stream is exact."""

    @initialize(
        num_pages=st.integers(4, 20),
        page_size=st.integers(1, 5),
        max_running=st.integers(1, 5),
        max_batch_tokens=st.integers(1, 12),
        capacity=st.integers(0, 3),
    )
    def start(self, num_pages: int, page_size: int, max_running: int, max_batch_tokens: int, capacity: int) -> None:
        self.context = num_pages * page_size
        self.bench = Bench(
            num_pages=num_pages,
            page_size=page_size,
            max_running=max_running,
            max_batch_tokens=max_batch_tokens,
            capacity=capacity,
        )
        self.next_id = 0
        self.frontend = 1
        self.expected: dict[tuple[int, int], list[int]] = {}

    @rule(data=st.data(), max_tokens=st.integers(1, 12), stop=st.integers(0, 96))
    def submit(self, data: st.DataObject, max_tokens: int, stop: int) -> None:
        prompt = data.draw(st.lists(st.integers(0, 96), min_size=1, max_size=min(14, self.context)))
        self.bench.submit(prompt, max_tokens, frontend=self.frontend, request_id=self.next_id, stop_ids=(stop,))
        count = min(max_tokens, self.context - len(prompt))
        self.expected[self.frontend, self.next_id] = expected_tokens(prompt, count, 97, (stop,))
        self.next_id += 1

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        frontend, request_id = data.draw(st.sampled_from(sorted(self.expected)))
        self.bench.cancel(request_id, frontend)
        del self.expected[frontend, request_id]

    @rule()
    def frontend_dies(self) -> None:
        self.bench.link.arrivals.append(FrontendDeath(self.frontend))
        self.expected = {key: tokens for key, tokens in self.expected.items() if key[0] != self.frontend}
        self.frontend += 1

    @rule()
    def step(self) -> None:
        self.bench.executor.run_one()

    @rule()
    def turn(self) -> None:
        self.bench.engine.turn()

    @invariant()
    def everything_is_owned_once(self) -> None:
        if hasattr(self, "bench"):
            self.bench.engine.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.run_dry()
        for (frontend, request_id), tokens in self.expected.items():
            assert self.bench.received(request_id, frontend).token_ids == tokens
        assert self.bench.pool.num_held == 0
        self.bench.close()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
