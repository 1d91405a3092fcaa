"""Steps that the kernels' thread runs one after the other give the tokens of steps that are awaited one by one."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.backend.forward_pass import (
    FROM_SLOT,
    PendingOutput,
    SamplingParams,
    SlotInit,
    StepBatch,
    TokenMasks,
)
from penstock.backend.passes.cpu.step_queue import QueuedTokens
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from tests.backend.passes.conftest import make_native_ops
from tests.backend.passes.decoder.test_decoder_pass import make_pass

PROMPTS = [[5, 6, 7, 8], [9, 3, 11], [40, 41, 42, 43, 44]]
SAMPLING = [SamplingParams(temperature=0.0), *(SamplingParams(top_p=0.95, seed=seed) for seed in (1, 2))]
NUM_STEPS = 40


@pytest.fixture
def forward_pass() -> Iterator[CpuDecoderPass]:
    decoder = make_pass("llama3", make_native_ops)
    decoder.create_cache(16, 16, "bf16")
    yield decoder
    decoder.close()


def begin(forward_pass: CpuDecoderPass, sampling: list[SamplingParams]) -> list[list[int]]:
    """Compute the prompts, each in the slot of its index."""
    tokens = []
    for slot, (prompt, settings) in enumerate(zip(PROMPTS, sampling, strict=True)):
        ids = np.array(prompt, np.int32)
        batch = StepBatch(
            input_ids=ids,
            query_starts=np.array([0, len(ids)], np.int32),
            context_lens=np.zeros(1, np.int32),
            page_table=pages([slot]),
            slots=np.array([slot], np.int32),
            logit_rows=np.zeros(1, np.int32),
            slot_inits=(SlotInit(slot, settings, ids, len(ids)),),
        )
        tokens.append(sample(forward_pass, batch).wait().token_ids.tolist())
    return tokens


def pages(slots: list[int]) -> np.ndarray:
    return np.arange(16, dtype=np.int32).reshape(4, 4)[slots]


def decode(index: int) -> StepBatch:
    count = len(PROMPTS)
    return StepBatch(
        input_ids=np.full(count, FROM_SLOT, np.int32),
        query_starts=np.arange(count + 1, dtype=np.int32),
        context_lens=np.array([len(prompt) + index for prompt in PROMPTS], np.int32),
        page_table=pages(list(range(count))),
        slots=np.arange(count, dtype=np.int32),
        logit_rows=np.arange(count, dtype=np.int32),
    )


def sample(forward_pass: CpuDecoderPass, batch: StepBatch, masks: TokenMasks | None = None) -> PendingOutput:
    return forward_pass.sample(forward_pass.forward(batch), batch, masks)


def answers(forward_pass: CpuDecoderPass, sampling: list[SamplingParams], masked: int = -1) -> list[list[int]]:
    """The tokens of all steps; masks allow the token 7 alone in the step `masked`."""
    begun = begin(forward_pass, sampling)
    bits = np.zeros((len(PROMPTS), -(-forward_pass.spec.vocab_size // 32)), np.uint32)
    bits[:, 0] = 1 << 7
    masks = TokenMasks(np.arange(len(PROMPTS), dtype=np.int32), bits)
    pending = [sample(forward_pass, decode(index), masks if index == masked else None) for index in range(NUM_STEPS)]
    return begun + [output.wait().token_ids.tolist() for output in pending]


@pytest.mark.parametrize(
    ("sampling", "masked", "num_queued"),
    [
        (SAMPLING, -1, NUM_STEPS),
        (SAMPLING, 20, NUM_STEPS - 1),
        ([*SAMPLING[:2], SamplingParams(seed=3, frequency_penalty=0.5)], -1, 0),
    ],
    ids=["plain", "with a masked step", "with a penalty"],
)
def test_queued_steps_give_the_same_tokens(
    forward_pass: CpuDecoderPass,
    monkeypatch: pytest.MonkeyPatch,
    sampling: list[SamplingParams],
    masked: int,
    num_queued: int,
) -> None:
    expected = answers(forward_pass, sampling, masked)
    forward_pass.run_ahead()
    assert forward_pass.spec.runs_ahead
    queued = list[QueuedTokens]()
    wait = QueuedTokens.wait
    monkeypatch.setattr(QueuedTokens, "wait", lambda output: queued.append(output) or wait(output))
    assert answers(forward_pass, sampling, masked) == expected
    assert len(queued) == num_queued


def test_logits_and_hidden_states_of_a_queued_step_are_awaited(forward_pass: CpuDecoderPass) -> None:
    begin(forward_pass, SAMPLING)
    sample(forward_pass, decode(0))
    expected = forward_pass.host_logits(forward_pass.forward(decode(1)))
    hidden = forward_pass.host_hidden_states(expected)
    forward_pass.run_ahead()
    handle = forward_pass.forward(decode(1))
    np.testing.assert_array_equal(forward_pass.host_logits(handle), expected)
    handle = forward_pass.forward(decode(1))
    np.testing.assert_array_equal(forward_pass.host_hidden_states(handle), hidden)


def test_skipped_step_changes_no_later_one(forward_pass: CpuDecoderPass) -> None:
    """The slots begin again, as they do for new owners."""
    expected = answers(forward_pass, SAMPLING)
    forward_pass.run_ahead()
    skipped = sample(forward_pass, decode(NUM_STEPS))
    assert isinstance(skipped, QueuedTokens)
    skipped.skip()
    assert len(skipped.wait().token_ids) == len(PROMPTS)
    assert answers(forward_pass, SAMPLING) == expected


def test_memory_of_a_step_that_nobody_waits_for_lives_until_later_ones_are_done(forward_pass: CpuDecoderPass) -> None:
    begin(forward_pass, SAMPLING)
    sample(forward_pass, decode(0))  # makes room
    forward_pass.run_ahead()
    dropped = sample(forward_pass, decode(1))
    assert isinstance(dropped, QueuedTokens)
    tokens = weakref.ref(dropped.tokens)
    del dropped
    assert tokens() is not None
    sample(forward_pass, decode(2)).wait()
    sample(forward_pass, decode(3)).wait()
    assert tokens() is None
