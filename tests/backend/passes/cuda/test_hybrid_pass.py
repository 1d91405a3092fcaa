"""Hybrids of attention and delta rules: states of slots. test_pass_on_emulator compares logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.shm.messages import Sampling
from penstock.tools.forward_pass_contract import test_contract
from penstock.tools.forward_pass_contract.steps import MAX_RUNNING, NUM_CHECKPOINTS, NUM_PAGES, StepRunner
from tests.backend.passes.cuda.emulated_pass import EmulatedCudaPass
from tests.backend.passes.cuda.test_pass_in_engine import AheadBench
from tests.backend.passes.cuda.tiny_models import (
    checkpoint,
    make_driver,
    make_pass,
    options,
    oracle_logits,
    prompts,
    run_prompts,
)
from tests.backend.passes.decoder.driver import Driver, run_in_a_used_slot


def make_deterministic(architecture: str) -> Driver:
    made = EmulatedCudaPass.load(checkpoint(architecture), replace(options("bf16"), deterministic=True))
    return Driver(made, num_pages=32, page_size=16, kv_dtype="bf16", seed=3)


@pytest.mark.parametrize("architecture", ["qwen3.5", "qwen3-next"])
def test_logits_are_the_same_bits_in_any_chunks_and_slots(architecture: str) -> None:
    """Alone, in a batch with chunks, and begun again in the slot of another sequence, as after a preemption.

    What a slot contains before a sequence begins is not read.
    """
    prompt, *others = prompts((45, 1, 30), seed=4)
    expected = run_prompts(make_deterministic(architecture), [prompt])[0]
    driver = make_deterministic(architecture)
    with torch.inference_mode():
        for part in driver.forward_pass._ops.delta_net.states:
            part.fill_(float("nan"))
    np.testing.assert_array_equal(run_in_a_used_slot(driver, prompt, others), expected)
    driver.forward_pass.device.require_same_graphs()


def test_states_have_the_announced_bytes_and_pages_only_layers_with_attention() -> None:
    made = make_driver("qwen3.5").forward_pass
    on_cpu = CpuDecoderPass.describe(checkpoint("qwen3.5"), options())
    states = made._ops.delta_net.states
    assert sum(part.nbytes for part in states) == states[0].shape[1] * made.spec.state_bytes_per_sequence
    assert made.spec.state_bytes_per_sequence == on_cpu.state_bytes_per_sequence
    assert made.spec.kv_bytes_per_token == {**on_cpu.kv_bytes_per_token, "fp8": on_cpu.kv_bytes_per_token["bf16"] // 2}
    assert not made.spec.verifies_drafts


def test_preempted_requests_have_the_tokens_of_transformers() -> None:
    """Runs in the engine with a step in flight; there are no host pages, because pages bring back no states."""
    made = EmulatedCudaPass.load(checkpoint("qwen3.5"), replace(options(max_batch_tokens=48), host_kv_bytes=1 << 30))
    bench = AheadBench(made, num_pages=7)
    batch = prompts((20, 30, 28))
    for request_id, prompt in enumerate(batch):
        bench.submit(list(prompt), 12, request_id=request_id)
    bench.run_dry()
    for request_id, prompt in enumerate(batch):
        tokens = bench.received(request_id).token_ids
        choices = oracle_logits("qwen3.5", (*prompt, *tokens[:-1])).argmax(axis=1)[len(prompt) - 1 :]
        assert tokens == choices.tolist()
        assert len(tokens) == 12
    assert bench.scheduler.num_preemptions > 0
    assert made.num_host_pages == 0
    bench.close()


@pytest.mark.parametrize("architecture", ["qwen3.5", "qwen3-next"])
def test_sequences_that_go_on_from_checkpoints_have_the_bits_of_those_computed_alone(architecture: str) -> None:
    """A step ahead: prompts share a beginning, and the first answer is continued."""
    system, *users = prompts((35, 7, 20, 12), seed=8)

    def answer_all(*, together: bool) -> tuple[list[Any], list[int]]:
        made = EmulatedCudaPass.load(
            checkpoint(architecture), replace(options(max_batch_tokens=48), deterministic=True)
        )
        bench, found = AheadBench(made, num_pages=32), []
        texts = [[*system, *user] for user in users]
        for request_id, text in enumerate([*texts, texts[0]]):
            answer = bench.received(0).token_ids if request_id == 3 else []
            salt = b"" if together else bytes([request_id]) * 16
            sampling = Sampling(num_logprobs=1, seed=5)
            bench.submit([*text, *answer], 24, request_id=request_id, sampling=sampling, salt=salt)
            if request_id != 1 or not together:
                bench.run_dry()
        for request_id in range(4):
            received = bench.received(request_id)
            assert received.started is not None
            found.append(received.started.cached_tokens)
        bench.close()
        return [(each.token_ids, each.logprobs) for each in map(bench.received, range(4))], found

    expected, none_cached = answer_all(together=False)
    found, num_cached = answer_all(together=True)
    assert found == expected
    assert none_cached == [0] * 4
    assert num_cached == [0, 32, 32, 64]


def test_checkpoints_are_restored_before_a_step_and_saved_after_it() -> None:
    made = EmulatedCudaPass.load(checkpoint("qwen3.5"), replace(options(), max_running=MAX_RUNNING))
    made.create_cache(NUM_PAGES, 16, "fp32")
    made.create_checkpoints(NUM_CHECKPOINTS)
    test_contract.test_row_goes_on_from_a_checkpoint_that_the_same_step_overwrites(StepRunner(made))


def test_pictures_have_the_inputs_of_layers_that_they_have_on_the_cpu() -> None:
    """Whatever a step before left behind: the first chunk of the picture has the places of other tokens."""
    on_cpu = CpuDecoderPass.load(checkpoint("gemma4-e"), options())
    picture = np.random.default_rng(5).normal(0.0, 0.2, (9, on_cpu.hidden_size)).astype(np.float32)
    logits = []
    for made in (on_cpu, make_pass("gemma4-e")):
        driver = Driver(made, num_pages=32, page_size=16, kv_dtype="fp32")
        driver.add(prompts((7,))[0])
        driver.prefill()
        row = driver.add_embedded(picture)
        driver.step([(row, 5)])
        logits.append(driver.step([(row, 4)])[row.slot])
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4, rtol=0)


def test_copied_pages_of_wide_heads_equal_their_sources() -> None:
    driver = make_driver("gemma4-e")
    prompt = prompts((40,))[0]
    row = driver.add(prompt)
    expected = driver.prefill()[row.slot]
    fork = driver.add(prompt)
    fork.pages, fork.computed = [driver.free_pages.pop() for _ in range(3)], 39
    copies = tuple(zip(row.pages, fork.pages, strict=True))
    batch = replace(driver.build([(fork, 1)]), page_copies=copies)
    logits = driver.forward_pass.host_logits(driver.forward_pass.forward(batch))[0]
    np.testing.assert_allclose(logits, expected, atol=1e-3, rtol=0)
