"""Adapters of rows in the CUDA pass, against transformers with merged weights: from the start, or while it runs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.forward_pass import NO_ADAPTER
from tests.backend.passes.cuda.emulated_pass import EmulatedCudaPass
from tests.backend.passes.cuda.tiny_models import VOCAB_SIZE, checkpoint, options
from tests.backend.passes.decoder.driver import Driver, DriverRow
from tests.backend.passes.decoder.quantized_oracle import relative_error
from tests.checkpoints import load_oracle
from tests.lora import make_adapter, merge
from tests.temporary import make_shared_directory

EACH = (NO_ADAPTER, 0, 1, 0)
LENGTHS = (1, 17, 9, 23)


@cache
def adapters(architecture: str) -> tuple[Path, ...]:
    """Of all linears; and of two, with a rank that is no multiple of 4."""
    model = load_oracle(checkpoint(architecture))
    return (
        make_adapter(model, make_shared_directory(), seed=1, rank=8),
        make_adapter(model, make_shared_directory(), seed=2, rank=3, targets=("v_proj", "down_proj")),
    )


@cache
def oracle(architecture: str, adapter: int) -> Any:
    model = load_oracle(checkpoint(architecture))
    return model if adapter == NO_ADAPTER else merge(model, adapters(architecture)[adapter])


def oracle_logits(architecture: str, row: DriverRow) -> np.ndarray:
    with torch.inference_mode():
        logits: np.ndarray = oracle(architecture, row.adapter)(torch.tensor([row.tokens[:-1]])).logits[0, -1].numpy()
    return logits


def make_driver(architecture: str, dtype: str = "fp32", **settings: Any) -> Driver:
    given = replace(options(dtype), adapters=adapters(architecture), **settings)
    return Driver(EmulatedCudaPass.load(checkpoint(architecture), given), 32, 16, kv_dtype=dtype)


def add_rows(driver: Driver, choices: tuple[int, ...] = EACH) -> list[DriverRow]:
    rng, rows = np.random.default_rng(4), []
    for adapter, length in zip(choices, LENGTHS, strict=True):
        rows.append(driver.add(rng.integers(0, VOCAB_SIZE, length).tolist()))
        rows[-1].adapter = adapter
    return rows


def adapted_replays(driver: Driver) -> int:
    return sum(graph.num_replays for graph in driver.forward_pass._adapted_graphs._graphs.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize(("architecture", "chunk"), [("llama3", None), ("qwen3.5", 7), ("qwen2-moe", None)])
def test_rows_of_captured_and_other_steps_equal_merged_weights(architecture: str, chunk: int | None) -> None:
    driver = make_driver(architecture)
    rows = add_rows(driver)
    found = driver.prefill(chunk)
    for _ in range(3):
        for row in rows:
            np.testing.assert_allclose(found[row.slot], oracle_logits(architecture, row), atol=1e-3, rtol=0)
        found = driver.step([(row, 1) for row in rows])
    assert adapted_replays(driver) == 3
    driver.forward_pass.device.require_same_graphs()


@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_adapters_in_bf16_stay_near_fp32(quantize: str) -> None:
    driver = make_driver("llama3", "bf16", quantize=quantize)
    rows = add_rows(driver)
    found = driver.prefill()
    for _ in range(2):
        for row in rows:
            assert relative_error(found[row.slot], oracle_logits("llama3", row)) < 0.06
        found = driver.step([(row, 1) for row in rows])


def test_adapters_come_and_go_between_steps() -> None:
    """The memory holds one at a time; graphs captured before it came use it."""
    given = replace(options(), adapter_budget_bytes=1)
    budget = max(map(EmulatedCudaPass.load(checkpoint("llama3"), given).adapter_bytes, adapters("llama3")))
    loaded = EmulatedCudaPass.load(checkpoint("llama3"), replace(given, adapter_budget_bytes=budget))
    driver = Driver(loaded, 32, 16, kv_dtype="fp32")
    for adapter in (0, 1, 0):
        loaded.put_adapter(0, loaded.read_adapter(adapters("llama3")[adapter]))
        rows = add_rows(driver, (NO_ADAPTER, 0, 0, 0))
        driver.prefill()
        found = driver.step([(row, 1) for row in rows])
        for row in rows:
            row.adapter = NO_ADAPTER if row.adapter == NO_ADAPTER else adapter
            np.testing.assert_allclose(found[row.slot], oracle_logits("llama3", row), atol=1e-3, rtol=0)
            driver.remove(row)
        loaded.put_adapter(0, None)


def test_plan_counts_the_memory_of_adapters() -> None:
    plain = EmulatedCudaPass.describe(checkpoint("llama3"), options())
    given = replace(options(), adapters=adapters("llama3"))
    described, loaded = EmulatedCudaPass.describe(checkpoint("llama3"), given), make_driver("llama3").forward_pass
    assert described.adapter_ranks == loaded.spec.adapter_ranks == (8, 3)
    assert (described.weight_bytes, described.workspace_bytes) == (
        loaded.spec.weight_bytes,
        loaded.spec.workspace_bytes,
    )
    held = loaded._ops.adapters  # type: ignore[attr-defined]
    taken = sum(tensor.nbytes for tensor in (held._memory, held._ranks))
    taken += sum(places.nbytes for places in held._places.values())
    planned = described.weight_bytes + described.workspace_bytes - plain.weight_bytes - plain.workspace_bytes
    assert 0 < taken <= planned
