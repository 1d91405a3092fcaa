"""An error in a step, or in our own code, fails the request that caused it and no other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.backend.engine.requests.limits import EngineLimits
from penstock.backend.engine.steps.executor import ExecutorFailed
from penstock.backend.passes.fake import FakePass
from penstock.shm.messages import FailureCode, Finish, Sampling
from tests.backend.harness import Bench, expected_tokens
from tests.fake_passes import StatefulFakePass


def test_error_at_intake_fails_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
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


class FaultyPass(FakePass):
    """Raises for token 90. Returns logits that are not finite for token 91."""

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


def test_failed_step_fails_its_request_and_the_engine_goes_on() -> None:
    bench = Bench(forward_pass=FaultyPass(90, 8), vocab_size=90)
    bench.requests.intake.limits = EngineLimits(97, 256, 10)
    bench.submit([1, 90], 5)
    bench.run_dry()
    assert bench.received().finishes == [Finish.FAILED]
    bench.submit([1, 2], 5, request_id=1)
    bench.run_dry()
    assert bench.received(1).token_ids == expected_tokens([1, 2], 5, 90)
    assert bench.pool.num_held == 0


def test_failed_step_fails_only_the_request_that_caused_it() -> None:
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
def test_passing_fault_of_the_device_fails_no_request(steps: set[int], capacity: int, is_late: bool) -> None:
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


class PassingFaultWithState(PassingFault, StatefulFakePass):
    pass


@pytest.mark.parametrize("capacity", [0, 1, 3])
@pytest.mark.parametrize("steps", [{1}, {4}, {2, 6, 7}])
def test_state_advances_once_for_each_token_whatever_fails(steps: set[int], capacity: int) -> None:
    """Sequences of a failed step begin again, in more than one step each."""
    forward_pass = PassingFaultWithState(steps, is_late=True)
    bench = Bench(forward_pass=forward_pass, capacity=capacity, max_batch_tokens=6)
    for request_id in range(4):
        bench.submit([request_id] * 11, 9, request_id=request_id)
    bench.run_dry()
    for request_id in range(4):
        assert bench.received(request_id).token_ids == expected_tokens([request_id] * 11, 9, bench.vocab_size)
    assert bench.board.requests_failed == 0
    assert forward_pass.num_steps > max(steps)


def test_process_ends_after_sixteen_failed_steps_in_a_row() -> None:
    bench = Bench(forward_pass=PassingFault(set(range(1, 99)), is_late=False))
    for request_id in range(12):
        bench.submit([request_id, 1], 5, request_id=request_id)
    with pytest.raises(ExecutorFailed, match="16 steps in a row"):
        bench.run_dry()
    assert bench.forward_pass.num_steps == 16


@pytest.mark.parametrize("part", ["build", "note_computed", "deliver"])
def test_internal_error_on_one_request_fails_that_request_alone(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
