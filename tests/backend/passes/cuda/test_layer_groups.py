"""Layers with windows may have pages of their own: the same bits as with shared pages, and the CPU's tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from penstock.backend.kv_cache.kv_groups import KvGroups
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.backend.passes.decoder.cuda_pass.forward_pass import CudaDecoderPass
from tests.backend.passes.cuda.emulated_pass import EmulatedCudaPass
from tests.backend.passes.cuda.test_pass_in_engine import AheadBench
from tests.backend.passes.cuda.tiny_models import checkpoint, options, oracle_logits, prompts, run_prompts
from tests.backend.passes.decoder.driver import Driver, run_past_window

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.backend.forward_pass import IBatchedForwardPass

WINDOW = 16 + 63


def run_steps(made: IBatchedForwardPass, kv_dtype: str) -> tuple[NDArray[np.float32], list[list[int]]]:
    """Logits of prompts in chunks, beside decodes and after them, and all tokens."""
    driver = Driver(made, num_pages=40, page_size=16, kv_dtype=kv_dtype)
    logits = run_prompts(driver, prompts((17, 90, 1)), chunk=31)
    long = driver.add(prompts((120,), seed=4)[0])
    short = driver.rows[:3]
    for count in (50, 69, 1):
        found = driver.step([*((row, 1) for row in short), (long, count)])
        logits += [found[row.slot] for row in short]
    for _ in range(4):
        logits += driver.step([(row, 1) for row in driver.rows]).values()
    return np.stack(logits), [row.tokens for row in driver.rows]


@pytest.mark.parametrize(
    ("architecture", "dtype", "kv_dtype", "deterministic"),
    [
        ("ministral", "fp32", "fp32", False),
        ("gemma3", "fp32", "q8_0", True),
        ("gpt-oss", "bf16", "bf16", False),
        ("gemma3n", "bf16", "bf16", True),
        ("qwen2-window", "bf16", "bf16", False),
    ],
)
def test_groups_with_pages_of_their_own_give_the_bits_of_shared_pages(
    architecture: str, dtype: str, kv_dtype: str, deterministic: bool
) -> None:
    model_dir, settings = checkpoint(architecture), replace(options(dtype), deterministic=deterministic)
    results = []
    for splits in (False, True):
        made = EmulatedCudaPass.load(model_dir, replace(settings, splits_layers=splits))
        assert made.spec == CudaDecoderPass.describe(model_dir, replace(settings, splits_layers=splits))
        results.append(run_steps(made, kv_dtype))
        num_groups = len(made.spec.kv_windows)
        num_tokens = 40 * num_groups * 16
        assert made._ops.cache.numel() == num_tokens * made.spec.kv_bytes_per_token[kv_dtype] // num_groups
        made.device.require_same_graphs()
    assert set(made.spec.kv_windows) == {None, WINDOW}
    np.testing.assert_array_equal(results[0][0].view(np.int32), results[1][0].view(np.int32))
    assert results[0][1] == results[1][1]


def test_tokens_equal_the_cpu_pass_with_the_same_groups() -> None:
    settings = replace(options(), splits_layers=True)
    passes = (
        CpuDecoderPass.load(checkpoint("gemma3"), settings),
        EmulatedCudaPass.load(checkpoint("gemma3"), settings),
    )
    assert passes[0].spec.kv_windows == passes[1].spec.kv_windows == (None, WINDOW, WINDOW)
    on_cpu, on_device = (run_steps(made, "fp32") for made in passes)
    np.testing.assert_allclose(on_device[0], on_cpu[0], atol=1e-3, rtol=0)
    assert on_device[1] == on_cpu[1]


def test_pages_behind_a_groups_window_are_not_read() -> None:
    """The table names pages full of NaN in their place."""
    results = []
    for is_poisoned in (False, True):
        made = EmulatedCudaPass.load(checkpoint("ministral"), replace(options(), splits_layers=True))
        driver = Driver(made, num_pages=64, page_size=16)
        with torch.inference_mode():
            made._ops.cache.fill_(0xFF)
        results.append(run_past_window(driver, is_poisoned=is_poisoned))
    np.testing.assert_array_equal(*results)


def test_requests_in_few_pages_have_the_tokens_of_transformers() -> None:
    """Runs in the engine: one of two groups releases pages, and requests preempt each other."""
    made = EmulatedCudaPass.load(checkpoint("ministral"), replace(options(), splits_layers=True))
    num_pages = KvGroups.of(16, made.spec.kv_windows, 48, 1).most_pages(230)
    bench = AheadBench(made, num_pages)
    batch = prompts((20, 30, 28, 150))
    for request_id, prompt in enumerate(batch):
        bench.submit(list(prompt), 60, request_id=request_id)
    bench.run_dry()
    for request_id, prompt in enumerate(batch):
        tokens = bench.received(request_id).token_ids
        choices = oracle_logits("ministral", (*prompt, *tokens[:-1])).argmax(axis=1)[len(prompt) - 1 :]
        assert tokens == choices.tolist()
        assert len(tokens) == 60
    assert bench.scheduler.num_preemptions > 0
    assert made.num_host_pages == 0
    bench.close()
