"""Models whose layers keep a state: in the engine, by the contract, and refused where the state does not do."""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.transformers_model import linear_attention
from penstock.backend.passes.transformers_model.forward_pass import TransformersPass
from penstock.backend.passes.transformers_model.linear_attention import SlotStates
from penstock.tools.forward_pass_contract import test_contract
from penstock.tools.forward_pass_contract.steps import MAX_RUNNING, NUM_CHECKPOINTS, NUM_PAGES, StepRunner
from tests.backend.harness import Bench
from tests.backend.passes.transformers_model.test_transformers_pass import checkpoint
from tests.checkpoints import load_oracle

PROMPTS = [np.random.default_rng(seed).integers(3, 512, length).tolist() for seed, length in enumerate((5, 33, 21))]
NUM_TOKENS = 64


@cache
def generated() -> list[list[int]]:
    oracle = load_oracle(checkpoint("qwen3-next"))
    oracle.generation_config.eos_token_id = None
    settings = transformers.GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0)
    return [
        oracle.generate(torch.tensor([prompt]), generation_config=settings)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]


def load(max_running: int) -> TransformersPass:
    return TransformersPass.load(checkpoint("qwen3-next"), PassOptions(dtype="fp32", max_running=max_running))


def test_engine_continues_qwen3_next_as_generate_does_also_after_preemption() -> None:
    """64 tokens of three prompts in chunks of at most 16 tokens, beside each other; slots are used again."""
    bench = Bench(forward_pass=load(2), max_running=2, num_pages=18, page_size=8, max_batch_tokens=16, vocab_size=512)
    for request_id, prompt in enumerate(PROMPTS):
        bench.submit(prompt, NUM_TOKENS, request_id=request_id, may_share=True)
    bench.submit(PROMPTS[1], NUM_TOKENS, request_id=9, may_share=True)  # joins its equal
    bench.run_dry()
    for request_id, tokens in enumerate(generated()):
        assert bench.received(request_id).token_ids == tokens
    assert bench.received(9).token_ids == generated()[1]
    assert bench.board.requests_coalesced == 1
    assert bench.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    "test",
    [
        test_contract.test_row_does_not_depend_on_the_other_rows,
        test_contract.test_sequence_waits_between_its_rows_and_begins_again_in_its_slot,
        test_contract.test_slots_keep_their_sequences_apart,
        test_contract.test_row_goes_on_from_a_checkpoint_that_the_same_step_overwrites,
    ],
)
def test_slots_keep_the_states_that_the_contract_asks_for(test: Any) -> None:
    forward_pass = load(MAX_RUNNING)
    forward_pass.create_cache(NUM_PAGES, 4, "fp32")
    forward_pass.create_checkpoints(NUM_CHECKPOINTS)
    test(StepRunner(forward_pass))


def test_states_take_the_bytes_that_the_spec_says_also_while_checkpoints_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward_pass, makes = load(3), SlotStates.__init__
    before = weakref.ref(next(iter(forward_pass._states.layers.values()))[1])
    found: list[object] = []

    def make(states: SlotStates, shapes: Any, *sizes: Any) -> None:
        found.extend([before()] if shapes else [])
        makes(states, shapes, *sizes)

    monkeypatch.setattr(SlotStates, "__init__", make)
    forward_pass.create_checkpoints(0)
    assert found == [None]
    states = [state for layer in forward_pass._states.layers.values() for state in layer]
    assert sum(state.numel() * state.itemsize for state in states) == 3 * forward_pass.spec.state_bytes_per_sequence
    conv, recurrent = 2 * 2 * 16 + 4 * 8, 4 * 16 * 8
    assert forward_pass.spec.state_bytes_per_sequence == 2 * 4 * (4 * conv + recurrent)


def test_layer_that_does_not_go_on_from_its_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check would find a layer that keeps something elsewhere: here its state is lost instead."""
    monkeypatch.setattr(linear_attention._RowCache, "update_recurrent_state", lambda *arguments: arguments[1])
    with pytest.raises(StartupError, match="in several steps a layer with a state differs"):
        load(1)
