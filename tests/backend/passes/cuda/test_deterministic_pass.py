"""`--deterministic` on the emulator: a row's logits are the same bits in any batch, chunks, slot and pages.

A patched matrix product gives other bits for another number of rows, on every machine.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.passes.cuda.device.kernel_choices import KernelChoices
from penstock.backend.passes.cuda.ops import matmul
from penstock.backend.passes.decoder.cuda_pass import workspace_plan
from penstock.backend.passes.decoder.cuda_pass.cuda_graphs import StepGraphs
from tests.backend.passes.cuda.emulated_pass import EmulatedCudaPass
from tests.backend.passes.cuda.tiny_models import checkpoint, options, prompts
from tests.backend.passes.decoder.driver import Driver, DriverRow

NUM_TOKENS = 6
PROMPT = prompts((45,), seed=20)[0]
OTHER_PROMPTS = prompts((1, 33, 16, 60, 17), seed=21)
MODELS = [
    ("llama3", "fp32", "fp32"),
    ("qwen3", "fp32", "bf16"),
    ("mistral", "fp32", "q8_0"),
    ("qwen2-window", "bf16", "fp8"),
    ("qwen2", "bf16", "bf16"),
    ("llama-bias", "bf16", "q8_0"),
]
"""Architecture, dtype of the weights, dtype of the cache: several group sizes, with windows and biases."""

Model = tuple[str, str, str]
LIBRARYS_PRODUCT = torch.mm

pytestmark = pytest.mark.usefixtures("choosy_library")


def make(model: Model, seed: int = 0, *, deterministic: bool = True) -> Driver:
    architecture, dtype, kv_dtype = model
    made = EmulatedCudaPass.load(checkpoint(architecture), replace(options(dtype, 192), deterministic=deterministic))
    return Driver(made, num_pages=32, page_size=16, kv_dtype=kv_dtype, seed=seed)


def multiply_alone(x: torch.Tensor, weights: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """Each row by itself."""
    for row, result in zip(x.split(1), out.split(1), strict=True):
        LIBRARYS_PRODUCT(row, weights, out=result)
    return out


def generate(driver: Driver, row: DriverRow, chunk: int | None = None) -> list[NDArray[np.float32]]:
    """Return the logits from which each new token of the row was chosen; the driver's other rows share the steps."""
    found = [driver.prefill(chunk)[row.slot]]
    while len(found) < NUM_TOKENS:
        found.append(driver.step([(each, 1) for each in driver.rows])[row.slot])
    return found


def generate_alone(model: Model) -> list[NDArray[np.float32]]:
    driver = make(model)
    return generate(driver, driver.add(PROMPT))


alone = cache(generate_alone)
"""A shared cache for tests that change only the driver."""


def require_same_bits(found: list[NDArray[np.float32]], expected: list[NDArray[np.float32]]) -> None:
    np.testing.assert_array_equal(np.stack(found).view(np.int32), np.stack(expected).view(np.int32))


@pytest.mark.parametrize("model", MODELS, ids="-".join)
def test_bits_do_not_depend_on_batch_slot_or_pages(model: Model) -> None:
    driver = make(model, seed=7)
    for other in OTHER_PROMPTS:
        driver.add(other)
    require_same_bits(generate(driver, driver.add(PROMPT)), alone(model))


@pytest.mark.parametrize(
    ("model", "chunk"),
    [(model, (1, 3, 16)[place % 3]) for place, model in enumerate(MODELS)],
    ids=lambda value: value if isinstance(value, int) else "-".join(value),
)
def test_bits_do_not_depend_on_chunk_sizes(model: Model, chunk: int) -> None:
    """Decodes and other chunks share the steps. Rows of one token are a whole chunk, the end of one, or a decode."""
    driver = make(model, seed=3)
    for other in OTHER_PROMPTS[:3]:
        driver.add(other)
    require_same_bits(generate(driver, driver.add(PROMPT), chunk), alone(model))


@pytest.mark.parametrize("model", MODELS[::2], ids="-".join)
def test_bits_do_not_change_when_a_sequence_is_recomputed(model: Model) -> None:
    """Tokens that were computed one by one are then part of a chunk, and vice versa."""
    expected = alone(model)
    driver = make(model, seed=5)
    row, other = driver.add(PROMPT), driver.add(OTHER_PROMPTS[3])
    found = [driver.prefill(chunk=19)[row.slot]]
    for chunk in (None, 1, 7, 46, 48):
        driver.free_pages = row.pages + driver.free_pages
        row.pages, row.computed = [], 0
        while row.computed < len(row.tokens) - 1:
            left = len(row.tokens) - 1 - row.computed
            driver.step([(row, min(left, chunk or left)), (other, 1)])
        found.append(driver.step([(row, 1)])[row.slot])
    require_same_bits(found, expected)


def test_captured_steps_and_single_launches_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = alone(MODELS[0])
    monkeypatch.setattr(StepGraphs, "size_for", lambda _self, _num_rows: None)
    require_same_bits(generate_alone(MODELS[0]), captured)


@pytest.mark.parametrize("model", MODELS[:2], ids="-".join)
def test_bits_do_not_depend_on_the_block_or_the_place_in_it(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have four rows, so that a captured step has several blocks."""
    monkeypatch.setattr(matmul, "BLOCK_ROWS", 4)
    expected = generate_alone(model)
    for num_before in (3, 4, 5):
        driver = make(model)
        for other in OTHER_PROMPTS[:num_before]:
            driver.add(other)
        require_same_bits(generate(driver, driver.add(PROMPT), chunk=7), expected)


def test_rows_that_fill_up_a_block_do_not_matter() -> None:
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


@pytest.mark.parametrize("is_invariant", [True, False])
def test_whole_products_keep_bits_where_the_library_does(is_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice for GPUs whose library gives a row the bits that it has alone; the other library shows the effect."""
    monkeypatch.setattr(workspace_plan, "adopted_choices", lambda _: (KernelChoices(whole_products=1), "of this test"))
    monkeypatch.setattr(StepGraphs, "size_for", lambda _self, _num_rows: None)
    if is_invariant:
        monkeypatch.setattr(torch, "mm", multiply_alone)
    by_itself = generate_alone(MODELS[0])
    driver = make(MODELS[0], seed=7)
    for other in OTHER_PROMPTS:
        driver.add(other)
    found = generate(driver, driver.add(PROMPT))
    assert np.array_equal(np.stack(found).view(np.int32), np.stack(by_itself).view(np.int32)) == is_invariant


def test_chunks_do_not_follow_the_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace_plan, "adopted_choices", lambda _: (KernelChoices(chunk_levels=1), "of this test"))
    config = read_decoder_config(checkpoint("llama3"))
    sizes = [
        workspace_plan.step_sizes(config, replace(options(), deterministic=each), torch.float32)
        for each in (False, True)
    ]
    assert [each.choices.chunk_levels for each in sizes] == [1, 0]


@pytest.mark.parametrize("others", ["batch", "chunks"])
def test_bits_differ_without_the_option(others: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This proves that the tests above can fail. Padded to the same size, steps would have the same bits."""
    monkeypatch.setattr(StepGraphs, "size_for", lambda _self, _num_rows: None)
    driver = make(MODELS[0], deterministic=False)
    by_itself = generate(driver, driver.add(PROMPT))
    driver = make(MODELS[0], deterministic=False)
    if others == "batch":
        driver.add(OTHER_PROMPTS[1])
    changed = generate(driver, driver.add(PROMPT), chunk=None if others == "batch" else 16)
    assert not np.array_equal(changed[0], by_itself[0])
    assert not np.array_equal(changed[-1], by_itself[-1])
