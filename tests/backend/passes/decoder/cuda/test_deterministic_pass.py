"""`--deterministic` on the emulator: a row's logits are the same bits in any company, chunks, slot and pages.

The library that multiplies gives other bits for another number of rows, whatever this machine's would do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.backend.passes.decoder.cuda.cuda_graphs import DecodeGraphs
from penstock.backend.passes.decoder.cuda.ops import matmul
from tests.backend.passes.decoder.cuda.emulated_pass import EmulatedCudaPass
from tests.backend.passes.decoder.cuda.tiny_models import checkpoint, options, prompts
from tests.backend.passes.decoder.driver import Driver, Row

NUM_TOKENS = 6
PROMPT = prompts((45,), seed=20)[0]
STRANGERS = prompts((1, 33, 16, 60, 17), seed=21)
MODELS = [
    ("llama3", "fp32", "fp32"),
    ("qwen3", "fp32", "bf16"),
    ("mistral", "fp32", "q8_0"),
    ("qwen2-window", "bf16", "fp8"),
    ("qwen2", "bf16", "bf16"),
    ("llama-bias", "bf16", "q8_0"),
]
"""Architecture, dtype of the weights, dtype of the cache: of groups of several sizes, with windows and biases."""

Model = tuple[str, str, str]


@pytest.fixture(autouse=True)
def choosy_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product's bits tell its number of rows."""

    def choosy(multiply: Any) -> Any:
        def by_rows(*operands: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            multiply(*operands, out=out)
            return out.mul_(1 + len(out) % 101 / 128)

        return by_rows

    for name in ("mm", "addmm"):
        monkeypatch.setattr(torch, name, choosy(getattr(torch, name)))


def make(model: Model, seed: int = 0, *, deterministic: bool = True) -> Driver:
    architecture, dtype, kv_dtype = model
    made = EmulatedCudaPass.load(checkpoint(architecture), replace(options(dtype, 192), deterministic=deterministic))
    return Driver(made, num_pages=32, page_size=16, kv_dtype=kv_dtype, seed=seed)


def generate(driver: Driver, row: Row, chunk: int | None = None) -> list[NDArray[np.float32]]:
    """The logits of which each new token of the row was chosen, beside whatever else the driver has."""
    found = [driver.prefill(chunk)[row.slot]]
    while len(found) < NUM_TOKENS:
        found.append(driver.step([(each, 1) for each in driver.rows])[row.slot])
    return found


def alone(model: Model) -> list[NDArray[np.float32]]:
    driver = make(model)
    return generate(driver, driver.add(PROMPT))


def require_same_bits(found: list[NDArray[np.float32]], expected: list[NDArray[np.float32]]) -> None:
    np.testing.assert_array_equal(np.stack(found).view(np.int32), np.stack(expected).view(np.int32))


@pytest.mark.parametrize("model", MODELS, ids="-".join)
def test_among_strangers_in_another_slot_and_other_pages(model: Model) -> None:
    driver = make(model, seed=7)
    for stranger in STRANGERS:
        driver.add(stranger)
    require_same_bits(generate(driver, driver.add(PROMPT)), alone(model))


@pytest.mark.parametrize("chunk", [1, 3, 16])
@pytest.mark.parametrize("model", MODELS, ids="-".join)
def test_in_chunks_of_any_size(model: Model, chunk: int) -> None:
    """Beside decodes and other chunks: rows of one token are a whole chunk, an end of one, and the next token."""
    driver = make(model, seed=3)
    for stranger in STRANGERS[:3]:
        driver.add(stranger)
    require_same_bits(generate(driver, driver.add(PROMPT), chunk), alone(model))


@pytest.mark.parametrize("model", MODELS, ids="-".join)
def test_computed_again_after_its_pages_were_taken(model: Model) -> None:
    """Tokens that were computed one by one are then part of a chunk, and the other way round."""
    expected = alone(model)
    driver = make(model, seed=5)
    row, stranger = driver.add(PROMPT), driver.add(STRANGERS[3])
    found = [driver.prefill(chunk=19)[row.slot]]
    for chunk in (None, 1, 7, 46, 48):
        driver.free_pages = row.pages + driver.free_pages
        row.pages, row.computed = [], 0
        while row.computed < len(row.tokens) - 1:
            left = len(row.tokens) - 1 - row.computed
            driver.step([(row, min(left, chunk or left)), (stranger, 1)])
        found.append(driver.step([(row, 1)])[row.slot])
    require_same_bits(found, expected)


def test_captured_and_kernel_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = alone(MODELS[0])
    monkeypatch.setattr(DecodeGraphs, "size_for", lambda _self, _num_rows: None)
    require_same_bits(alone(MODELS[0]), captured)


@pytest.mark.parametrize("model", MODELS[:2], ids="-".join)
def test_in_whatever_block_and_place_of_it(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four rows, so that a captured step has several."""
    monkeypatch.setattr(matmul, "BLOCK_ROWS", 4)
    expected = alone(model)
    for num_before in (3, 4, 5):
        driver = make(model)
        for stranger in STRANGERS[:num_before]:
            driver.add(stranger)
        require_same_bits(generate(driver, driver.add(PROMPT), chunk=7), expected)


def test_rows_that_fill_up_a_block_are_never_looked_at() -> None:
    model = MODELS[4]
    driver = make(model)
    row = driver.add(PROMPT)
    buffers = driver.forward_pass._ops._all
    found = []
    for step in range(NUM_TOKENS):
        with torch.inference_mode():
            for name in ("hidden", "qkv", "attended", "added", "gate_up", "gated"):
                getattr(buffers, name).fill_(torch.nan)
            driver.forward_pass._ops._logits.fill_(torch.nan)
        found.append(driver.prefill()[row.slot] if step == 0 else driver.step([(row, 1)])[row.slot])
    require_same_bits(found, alone(model))


@pytest.mark.parametrize("others", ["company", "chunks"])
def test_without_the_option_these_cases_differ(others: str) -> None:
    """So they could fail."""
    driver = make(MODELS[0], deterministic=False)
    by_itself = generate(driver, driver.add(PROMPT))
    driver = make(MODELS[0], deterministic=False)
    if others == "company":
        driver.add(STRANGERS[1])
    changed = generate(driver, driver.add(PROMPT), chunk=None if others == "company" else 16)
    assert not np.array_equal(changed[0], by_itself[0])
    assert not np.array_equal(changed[-1], by_itself[-1])
