"""Captured mixed steps: the same bits as launched kernel by kernel, whatever their padding holds."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from penstock.backend.checkpoint.config_json import parse_decoder_config
from penstock.backend.passes.cuda.attention import prefill_attention
from penstock.backend.passes.cuda.device.kernel_choices import KernelChoices
from penstock.backend.passes.decoder.cuda_pass.cuda_graphs import MixedGraphs, mixed_sizes
from penstock.backend.passes.decoder.cuda_pass.workspace_plan import StepSizes, captured_sizes, captured_sizes_of
from tests.backend.passes.cuda.emulated_pass import EmulatedCudaPass
from tests.backend.passes.cuda.tiny_models import checkpoint, make_driver, options, prompts
from tests.backend.passes.decoder.driver import Driver, joined

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_TOKENS = 128
STEPS = (
    ((0, 7), (1, 57)),  # 64 tokens: no padding; the second row goes on
    ((0, 1), (1, 33), (2, 1)),
    ((0, 1), (1, 1), (2, 1), (3, 125)),  # 128 tokens: no padding
    ((0, 1), (4, 1)),  # rows of one token, one of them without logits
    ((0, 1), (1, 1), (2, 1), (3, 1), (4, 18), (5, 30)),
    ((0, 1), (4, 1)),
)
"""Rows, each with a number of tokens. The last step is a decode step."""
LENGTHS = (7, 90, 1, 126, 19, 30)
SCORED_ROW, EMBEDDED_ROW = 1, 5
NUM_MIXED = len(STEPS) - 1


@dataclass
class Outcome:
    logits: list[NDArray[np.float32]]
    tokens: list[list[int]]
    scores: NDArray[np.float32]
    cache: NDArray[np.uint8]
    num_replays: int


def run_steps(model: tuple[str, str, str], *, poisons: bool = False, **more_options: Any) -> Outcome:
    architecture, dtype, kv_dtype = model
    settings = replace(options(dtype, MAX_TOKENS), **more_options)
    made = EmulatedCudaPass.load(checkpoint(architecture), settings)
    driver = Driver(made, num_pages=64, page_size=16, kv_dtype=kv_dtype)
    rng = np.random.default_rng(3)
    rows = [driver.add(prompt) for prompt in prompts(LENGTHS[:EMBEDDED_ROW], seed=8)]
    rows.append(driver.add_embedded(rng.standard_normal((LENGTHS[EMBEDDED_ROW], made.hidden_size), np.float32)))
    rows[SCORED_ROW].is_scored = True
    before = num_replays(made)
    logits = []
    for step in STEPS:
        if poisons:
            with torch.inference_mode():
                for name in ("hidden", "qkv", "attended", "added", "gate_up", "gated"):
                    getattr(made._ops._all, name).fill_(torch.nan)
        found = driver.step([(rows[index], count) for index, count in step])
        logits += [found[slot] for slot in sorted(found)]
    made.device.require_same_graphs()
    return Outcome(
        logits, [row.tokens for row in rows], joined(driver.scores[SCORED_ROW]).top, made._ops.cache.numpy().copy(),
        num_replays(made) - before,
    )  # fmt: skip


def num_replays(made: Any) -> int:
    return sum(graph.num_replays for graph in made._mixed_graphs._graphs._graphs.values())


def require_same(found: Outcome, expected: Outcome) -> None:
    assert found.tokens == expected.tokens
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert np.isfinite(other).all()
        np.testing.assert_array_equal(one.view(np.int32), other.view(np.int32))
    np.testing.assert_array_equal(found.scores, expected.scores)
    np.testing.assert_array_equal(found.cache, expected.cache)


def launch_singly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MixedGraphs, "fit", lambda *_: None)


@pytest.fixture
def rowwise_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply each row alone, so that a product's bits do not depend on the number of rows."""

    def mm(x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        torch.bmm(x[:, None], weight.expand(len(x), *weight.shape), out=out[:, None])
        return out

    def addmm(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, **factors: float) -> Any:
        weights, biases = weight.expand(len(x), *weight.shape), bias.expand(len(x), 1, *bias.shape)
        torch.baddbmm(biases, x[:, None], weights, out=out[:, None], **factors)
        return out

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)


@pytest.mark.usefixtures("rowwise_library")
@pytest.mark.parametrize(
    ("model", "more_options"),
    [
        (("llama-bias", "bf16", "fp8"), {}),
        (("ministral", "fp32", "q8_0"), {}),
        (("gpt-oss", "bf16", "bf16"), {}),
        (("qwen3-next", "fp32", "bf16"), {}),
        (("qwen3", "bf16", "q8_0"), {"quantize": "int8"}),
        (("llama-tied", "fp32", "bf16"), {"max_running": 70}),  # there may be more rows than tokens
    ],
    ids=lambda value: "-".join(value),
)
def test_captured_and_single_launches_give_the_same_bits(
    model: tuple[str, str, str], more_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits, tokens, log probabilities of a prompt, and the whole cache; NaN lies where padding tokens are."""
    captured = run_steps(model, poisons=True, **more_options)
    assert captured.num_replays == NUM_MIXED
    launch_singly(monkeypatch)
    single = run_steps(model, **more_options)
    assert single.num_replays == 0
    require_same(captured, single)


@pytest.mark.usefixtures("choosy_library")
@pytest.mark.parametrize("model", [("llama3", "fp32", "q8_0"), ("llama-bias", "bf16", "bf16")], ids="-".join)
def test_deterministic_steps_have_the_same_bits_captured(
    model: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = run_steps(model, poisons=True, deterministic=True)
    assert captured.num_replays == NUM_MIXED
    launch_singly(monkeypatch)
    require_same(captured, run_steps(model, deterministic=True))


def test_a_step_with_more_tiles_than_its_graph_is_launched_singly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_attention, "_SPARE_TILES", 2)
    driver = make_driver(kv_dtype="bf16")
    rows = [driver.add(prompt) for prompt in prompts((9, 9, 9, 9))]
    before = num_replays(driver.forward_pass)
    driver.step([(row, 4) for row in rows[:3]])
    assert num_replays(driver.forward_pass) == before + 1
    driver.step([(row, 4) for row in rows])
    assert num_replays(driver.forward_pass) == before + 1


def test_a_captured_mixed_step_takes_one_copy_to_the_device_and_one_back() -> None:
    driver = make_driver()
    first, second = (driver.add(prompt) for prompt in prompts((5, 20)))
    driver.step([(first, 5)])
    device = driver.forward_pass.device
    before = device.num_events
    driver.step([(first, 1), (second, 20)])
    assert device.num_events == before + 2


def test_sizes_are_few_and_end_with_the_largest_captured_step() -> None:
    assert mixed_sizes(8192, 256, 512) == [*range(64, 513, 64), 640, 768]
    assert mixed_sizes(8192, 32, 2048) == [*range(64, 513, 64), *range(640, 1025, 128), 1280, 1536, 1792, 2048, 2080]
    assert mixed_sizes(1984, 256, 2048)[-3:] == [1536, 1792, 1984]
    assert mixed_sizes(2048, 64, 512) == [*range(64, 513, 64), 576]
    assert mixed_sizes(2048, 64, 128) == [64, 128, 192]
    assert mixed_sizes(100, 64, 512) == [64, 100]
    assert mixed_sizes(2048, 64, 0) == []


def test_only_steps_beyond_captured_decodes_round_rows_unless_chosen() -> None:
    """The library may allocate for products of 8 bits, which by default begin at 257 rows."""
    sizes = StepSizes(64, 1024, 4096)
    assert captured_sizes(sizes, 1 << 30, 1 << 29, 28, rounds_rows=True) == [64, 128, 192, 256]
    assert captured_sizes(sizes, 1 << 30, 1 << 29, 28, rounds_rows=False)[-1] == 1024
    sizes = StepSizes(64, 1024, 4096, choices=KernelChoices(rounded_rows=17))
    assert captured_sizes(sizes, 1 << 30, 1 << 29, 28, rounds_rows=True)[-1] == 1024, "decode steps round rows too"
    wide = StepSizes(1000, 1024, 4096)
    assert [wide.decode_sizes(rounds_rows=rounds)[-1] for rounds in (True, False)] == [256, 512]
    assert replace(wide, choices=sizes.choices).decode_sizes(rounds_rows=True)[-1] == 512


def test_no_captured_step_has_grouped_products_of_experts() -> None:
    """The library allocates their results."""
    sizes = StepSizes(64, 1024, 4096, choices=KernelChoices(grouped_rows=513))
    for preset, largest in (("mistral", 1024), ("mixtral", 512)):
        config = parse_decoder_config(json.loads((checkpoint(preset) / "config.json").read_text()))
        assert captured_sizes_of(config, torch.bfloat16, sizes, 1 << 20, rounds_rows=False)[-1] == largest


def test_only_steps_whose_launches_take_longer_than_their_products_are_captured() -> None:
    models = {
        "0.6B": (1_190_000_000, 595_000_000, 28),
        "4B": (8_040_000_000, 4_020_000_000, 36),
        "8B": (16_060_000_000, 8_030_000_000, 32),
        "14B": (29_600_000_000, 14_800_000_000, 40),
        "8B int4": (4_700_000_000, 8_030_000_000, 32),  # its products take as long beyond a few rows
    }
    sizes = StepSizes(256, 2048, 4096)
    found = {name: captured_sizes(sizes, *model, rounds_rows=False) for name, model in models.items()}
    assert found["14B"] == []
    assert found["8B"] == found["8B int4"] == [64, 128, 192]
    assert (found["4B"][-1], found["0.6B"][-1]) == (448, 2048)
