"""The executor with a pass that runs ahead: steps are launched while the device still computes earlier ones."""

from __future__ import annotations

import queue
import select
import threading
from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import Mock

import numpy as np
import pytest

from penstock.backend.engine.steps.executor import Executor, ExecutorFailed
from penstock.backend.engine.steps.launched_step import StepResult
from penstock.backend.forward_pass import (
    FROM_SLOT,
    DeviceLost,
    SamplingParams,
    SlotInit,
    StepBatch,
    StepOutput,
    TokenMasks,
)
from penstock.backend.passes.fake import FakePass
from penstock.backend.scheduling.step_plan import Plan
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.subscribers import Subscriber
from tests.fake_passes import next_token

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCAB_SIZE = 100
PROMPT = [5, 6, 7]


class Pending:
    """The tokens of a step; `wait` blocks until the test lets the device compute it."""

    def __init__(self, output: StepOutput) -> None:
        self.output = output
        self.gate = threading.Event()
        self.fault: Exception | None = None

    def let_go(self, fault: Exception | None = None) -> None:
        self.fault = fault
        self.gate.set()

    def wait(self) -> StepOutput:
        self.gate.wait()
        if self.fault is not None:
            raise self.fault
        return self.output


class AheadPass(FakePass):
    """Each launched step is put into `launched` and waits until the test lets it go."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE, 2)
        self.spec = replace(self.spec, runs_ahead=True)
        self.launched: queue.SimpleQueue[Pending] = queue.SimpleQueue()
        self.create_cache(1, 16, "fp32")

    def sample(self, logits: np.ndarray, batch: StepBatch, masks: TokenMasks | None = None) -> Pending:  # type: ignore[override]
        pending = Pending(super().sample(logits, batch, masks))
        self.launched.put(pending)
        return pending


@pytest.fixture
def ahead() -> Iterator[tuple[Executor, AheadPass, Sequence]]:
    executor = Executor(1)
    forward_pass = AheadPass()
    executor.start(lambda: forward_pass)
    subscriber = Subscriber(
        0, 1, 16, frozenset([next_token([*PROMPT, next_token(PROMPT, VOCAB_SIZE)], VOCAB_SIZE)]), 3, 0.0
    )
    sequence = Sequence(subscriber, np.array(PROMPT, np.int32).tobytes(), 3, SamplingParams(temperature=0.0))
    yield executor, forward_pass, sequence
    executor.close()


def launch(
    executor: Executor,
    sequence: Sequence,
    ids: list[int],
    start: int,
    *,
    samples: bool = True,
    saves: tuple[tuple[int, int], ...] = (),
) -> None:
    logit_rows = [0] if samples else []
    init = SlotInit(0, sequence.sampling, np.array(PROMPT, np.int32), 3)
    batch = StepBatch(
        input_ids=np.array(ids, np.int32),
        query_starts=np.array([0, len(ids)], np.int32),
        context_lens=np.array([start], np.int32),
        page_table=np.zeros((1, 1), np.int32),
        slots=np.zeros(1, np.int32),
        logit_rows=np.array(logit_rows, np.int32),
        slot_inits=(init,) if start == 0 else (),
    )
    ends, lengths = [start + len(ids)], [len(ids)]
    executor.launch(Plan([sequence], [sequence.generation], [0], ends, lengths, logit_rows=logit_rows), batch, saves)


def next_results(executor: Executor, count: int) -> list[StepResult]:
    """Wait for the executor's wake-ups until it has delivered that many results."""
    results: list[StepResult] = []
    while len(results) < count:
        select.select([executor.wake_fd], [], [], 10)
        executor.clear_wake()
        results += executor.results()
    return results


def test_step_is_launched_before_the_tokens_of_the_previous_step_are_known(
    ahead: tuple[Executor, AheadPass, Sequence],
) -> None:
    executor, forward_pass, sequence = ahead
    launch(executor, sequence, PROMPT, 0)
    first = forward_pass.launched.get(timeout=60)
    launch(executor, sequence, [FROM_SLOT], 3)
    second = forward_pass.launched.get(timeout=60)
    assert executor.results() == []
    assert executor.running_s() > 0
    second.let_go()
    first.let_go()
    results = next_results(executor, 2)
    token = next_token(PROMPT, VOCAB_SIZE)
    assert [result.token_ids for result in results] == [[token], [next_token([*PROMPT, token], VOCAB_SIZE)]]
    assert [result.stops for result in results] == [(), (0,)]
    assert executor.running_s() == 0


def test_step_launched_after_its_sequence_stopped_has_no_row_of_it(
    ahead: tuple[Executor, AheadPass, Sequence],
) -> None:
    executor, forward_pass, sequence = ahead
    launch(executor, sequence, PROMPT, 0)
    forward_pass.launched.get(timeout=60).let_go()
    launch(executor, sequence, [FROM_SLOT], 3)
    forward_pass.launched.get(timeout=60).let_go()
    next_results(executor, 2)
    launch(executor, sequence, [FROM_SLOT], 4)
    (result,) = next_results(executor, 1)
    assert len(result.plan) == 0
    assert forward_pass.launched.empty()


def test_step_that_samples_nothing_ends_when_the_device_has_computed_it(
    ahead: tuple[Executor, AheadPass, Sequence],
) -> None:
    executor, forward_pass, sequence = ahead
    launch(executor, sequence, PROMPT[:2], 0, samples=False)
    chunk = forward_pass.launched.get(timeout=60)
    launch(executor, sequence, PROMPT[2:], 2)
    forward_pass.launched.get(timeout=60).let_go()
    assert not executor.has_capacity
    chunk.let_go()
    results = next_results(executor, 2)
    assert [result.token_ids for result in results] == [[], [next_token(PROMPT, VOCAB_SIZE)]]
    assert executor.has_capacity


@pytest.mark.parametrize("fault", [ValueError("planted"), DeviceLost("planted")])
def test_device_fault_fails_the_step_that_raised_it(
    ahead: tuple[Executor, AheadPass, Sequence], fault: Exception
) -> None:
    executor, forward_pass, sequence = ahead
    launch(executor, sequence, PROMPT, 0)
    forward_pass.launched.get(timeout=60).let_go(fault)
    (result,) = next_results(executor, 1)
    assert result.error is fault
    assert result.token_ids == []
    assert result.plan.live_rows() == []


def test_rows_that_build_on_a_step_whose_launch_failed_are_dropped(
    ahead: tuple[Executor, AheadPass, Sequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, forward_pass, sequence = ahead
    launch(executor, sequence, PROMPT, 0)
    first = forward_pass.launched.get(timeout=60)
    fault = ValueError("planted")
    monkeypatch.setattr(forward_pass, "begin_step", Mock(side_effect=fault))
    launch(executor, sequence, [FROM_SLOT], 3)
    launch(executor, sequence, [FROM_SLOT], 4)
    first.let_go()
    results = next_results(executor, 3)
    assert [len(result.plan) for result in results] == [1, 1, 0]
    assert [result.error for result in results] == [None, fault, None]


def test_executor_fails_when_the_collector_thread_dies() -> None:
    executor = Executor(1)
    forward_pass = AheadPass()
    executor.start(lambda: forward_pass)
    sequence = Sequence(
        Subscriber(0, 1, 16, frozenset(), 3, 0.0), np.array(PROMPT, np.int32).tobytes(), 3, SamplingParams()
    )
    launch(executor, sequence, PROMPT, 0)
    forward_pass.launched.get(timeout=60).let_go(SystemExit("planted"))  # type: ignore[arg-type]
    with pytest.raises(ExecutorFailed, match="has died"):
        next_results(executor, 1)
    with pytest.raises(ExecutorFailed, match="has died"):
        executor.close()


def test_executor_names_a_device_lost_while_pages_are_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor, forward_pass = Executor(1), AheadPass()
    monkeypatch.setattr(forward_pass, "save_pages", Mock(side_effect=DeviceLost("saving 1 pages: planted")))
    executor.start(lambda: forward_pass)
    sequence = Sequence(
        Subscriber(0, 1, 16, frozenset(), 3, 0.0), np.array(PROMPT, np.int32).tobytes(), 3, SamplingParams()
    )
    launch(executor, sequence, PROMPT, 0, saves=((0, 0),))
    select.select([executor.wake_fd], [], [], 10)
    with pytest.raises(ExecutorFailed, match="the device is lost: saving 1 pages: planted"):
        executor.results()
    with pytest.raises(ExecutorFailed, match="the device is lost"):
        executor.close()
