"""Adapters of rows in the CPU's decoder, against transformers with merged weights: W + scale × B × A in fp32."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.quantization import cached_file
from penstock.backend.checkpoint.quantization.modes import find_cpu_quantization
from penstock.backend.checkpoint.quantization.quantized_checkpoint import open_quantized
from penstock.backend.checkpoint.tensor_files.lora_adapter import open_adapters
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.dtypes import Dtype
from penstock.backend.forward_pass import NO_ADAPTER, PassOptions
from penstock.backend.options import BackendOptions
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.backend.start.startup import describe_pass
from tests.backend.passes.conftest import MakeOps, groups_for, make_native_ops, make_torch_ops
from tests.backend.passes.decoder import test_quantized_pass as quantized
from tests.backend.passes.decoder.driver import Driver, DriverRow
from tests.backend.passes.decoder.quantized_oracle import relative_error
from tests.checkpoints import load_oracle, make_checkpoint
from tests.lora import hook, make_adapter, merge
from tests.temporary import make_shared_directory

PRESETS = (
    *("llama3", "gemma2", "gemma3", "granite", "starcoder2"),
    *("phi3-partial", "glm4", "cohere-qk-norm", "qwen2-moe", "olmo3", "gemma4", "gemma4-e", "qwen3.5", "qwen3-next"),
)
"""Fused linears, interleaved rotation, scaled and normed results, parallel blocks, an MLP without a gate, experts."""
EACH = (NO_ADAPTER, 0, 1, 2)
LENGTHS = (1, 17, 40, 9)


@cache
def checkpoint(preset: str) -> Path:
    return make_checkpoint(preset, make_shared_directory())


@cache
def adapters(preset: str) -> tuple[Path, ...]:
    """Adapters of all linears; of two, with ranks that are not multiples of 4; and of two with a rank each."""
    model = load_oracle(checkpoint(preset))
    plain = preset == "starcoder2"
    fused = preset in ("phi3-partial", "glm4")
    two = ("qkv_proj" if preset == "phi3-partial" else "v_proj", "c_proj" if plain else "down_proj")
    first = "c_fc" if plain else "gate_up_proj" if fused else "gate_proj"
    return (
        make_adapter(model, make_shared_directory(), seed=1, rank=8),
        make_adapter(model, make_shared_directory(), seed=2, rank=3, alpha=8.0, targets=two, use_rslora=True),
        make_adapter(
            model, make_shared_directory(), seed=3, rank=4, targets=(first, "o_proj"),
            rank_pattern={first: 6}, alpha_pattern={"o_proj": 3.0},
        ),
    )  # fmt: skip


@cache
def oracle(preset: str, adapter: int) -> Any:
    model = load_oracle(checkpoint(preset))
    return model if adapter == NO_ADAPTER else merge(model, adapters(preset)[adapter])


def oracle_logits(preset: str, adapter: int, tokens: list[int]) -> NDArray[np.float32]:
    """[n, vocab]"""
    with torch.inference_mode():
        logits: NDArray[np.float32] = oracle(preset, adapter)(torch.tensor([tokens])).logits[0].numpy()
    return logits


def make_pass(
    preset: str, make_ops: MakeOps, dtype: torch.dtype = torch.float32, *, with_adapters: bool = True
) -> CpuDecoderPass:
    model_dir = checkpoint(preset)
    config = read_decoder_config(model_dir)
    chosen = adapters(preset) if with_adapters else ()
    with open_weights(model_dir, config) as weights, open_adapters(model_dir, chosen, config) as opened:
        ops = make_ops(config, dtype)
        return CpuDecoderPass(
            config, weights, ops, Dtype.of(dtype), 32, groups=groups_for(ops, config), adapters=opened
        )


def add_rows(driver: Driver, choices: tuple[int, ...] = EACH, seed: int = 0) -> list[DriverRow]:
    rng = np.random.default_rng(seed)
    rows = []
    for adapter, length in zip(choices, LENGTHS, strict=False):
        row = driver.add(rng.integers(0, 256, length).tolist())
        row.adapter = adapter
        rows.append(row)
    return rows


@pytest.mark.parametrize(
    ("preset", "chunk", "make"),
    list(zip(PRESETS, cycle((None, 7)), cycle((make_native_ops, make_native_ops, make_torch_ops)), strict=False)),
)
def test_rows_with_their_own_adapters_equal_merged_weights(preset: str, chunk: int | None, make: MakeOps) -> None:
    """Prefill in one step or in chunks, then a decode step of all rows."""
    driver = Driver(make_pass(preset, make), num_pages=64, page_size=8)
    rows = add_rows(driver, seed=4)
    found = driver.prefill(chunk)
    for _ in range(2):
        for row in rows:
            expected = oracle_logits(preset, row.adapter, row.tokens[:-1])[-1]
            np.testing.assert_allclose(found[row.slot], expected, atol=1e-3, rtol=0)
        found = driver.step([(row, 1) for row in rows])


def test_adapters_on_every_path_equal_merged_weights(make_ops: MakeOps) -> None:
    driver = Driver(make_pass("llama3", make_ops), num_pages=64, page_size=8)
    rows = add_rows(driver)
    found = driver.prefill(16)
    for row in rows:
        expected = oracle_logits("llama3", row.adapter, row.tokens[:-1])[-1]
        np.testing.assert_allclose(found[row.slot], expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("preset", ["llama3", "glm4"])
def test_64_greedy_tokens_of_each_adapter_equal_those_of_merged_weights(preset: str, make_usual_ops: MakeOps) -> None:
    driver = Driver(make_pass(preset, make_usual_ops), num_pages=64, page_size=16)
    rows = add_rows(driver, seed=1)
    driver.prefill()
    driver.decode(63)
    for row in rows:
        choices = oracle_logits(preset, row.adapter, row.tokens[:-1]).argmax(axis=1)[row.num_prompt_tokens - 1 :]
        assert row.tokens[row.num_prompt_tokens :] == choices.tolist()
        assert len(choices) == 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_row_has_the_same_bits_alone_and_beside_rows_of_other_adapters(
    dtype: torch.dtype, make_deterministic: MakeOps
) -> None:
    """A row without an adapter has those of a server that has no adapters."""
    together = Driver(make_pass("llama3", make_deterministic, dtype), num_pages=64, page_size=8)
    rows = add_rows(together)
    found = [together.prefill(), together.step([(row, 1) for row in rows])]
    for index, row in enumerate(rows):
        with_adapters = row.adapter != NO_ADAPTER
        alone = Driver(
            make_pass("llama3", make_deterministic, dtype, with_adapters=with_adapters), num_pages=64, page_size=8
        )
        (again,) = [alone.add(row.tokens[: LENGTHS[index]])]
        again.adapter = row.adapter
        first = alone.prefill(chunk=5)
        np.testing.assert_array_equal(first[again.slot], found[0][row.slot])
        np.testing.assert_array_equal(alone.step([(again, 1)])[again.slot], found[1][row.slot])


def test_adapters_in_bf16_stay_near_fp32(make_usual_ops: MakeOps) -> None:
    driver = Driver(make_pass("llama3", make_usual_ops, torch.bfloat16), num_pages=64, page_size=8)
    rows = add_rows(driver)
    found = driver.prefill()
    for row in rows:
        exact = oracle_logits("llama3", row.adapter, row.tokens[:-1])[-1]
        assert relative_error(found[row.slot], exact) < 0.06


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_adapters_over_quantised_weights(
    mode: str, make_usual_ops: MakeOps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against transformers with the same quantised weights, to which hooks add the products in fp32."""
    monkeypatch.setattr(cached_file, "cache_directory", lambda: tmp_path / "cache")
    model_dir, base = quantized.checkpoint("llama3"), quantized.oracle("llama3", mode)
    adapter = make_adapter(load_oracle(model_dir), tmp_path, rank=8, size=0.1)
    config, quantization = read_decoder_config(model_dir), find_cpu_quantization(mode)
    with (
        open_quantized(model_dir, config, quantization) as weights,
        open_adapters(model_dir, [adapter], config) as opened,
    ):
        ops = make_usual_ops(config, torch.float32)
        decoder = CpuDecoderPass(config, weights, ops, Dtype.FP32, 32, quantization=quantization, adapters=opened)
    driver = Driver(decoder, num_pages=64, page_size=8)
    rows = add_rows(driver, (NO_ADAPTER, 0, 0))
    found = driver.prefill()
    adapted = hook(deepcopy(base), adapter)
    for row in rows:
        model = base if row.adapter == NO_ADAPTER else adapted
        with torch.inference_mode():
            exact = model(torch.tensor([row.tokens[:-1]])).logits[0, -1].numpy()
            other = (adapted if model is base else base)(torch.tensor([row.tokens[:-1]])).logits[0, -1].numpy()
        # An activation at a border between two integers falls on either side, depending on the order of sums.
        assert relative_error(found[row.slot], exact) < 0.03 < 0.3 < relative_error(other, exact)


def test_spec_has_ranks_and_bytes_before_and_after_loading() -> None:
    options = PassOptions(dtype="fp32", adapters=adapters("llama3"))
    described = CpuDecoderPass.describe(checkpoint("llama3"), options)
    plain = CpuDecoderPass.describe(checkpoint("llama3"), PassOptions(dtype="fp32"))
    assert described.adapter_ranks == (8, 3, 6)
    assert plain.adapter_ranks == ()
    config = read_decoder_config(checkpoint("llama3"))
    with open_adapters(checkpoint("llama3"), options.adapters, config) as opened:
        assert described.weight_bytes - plain.weight_bytes == 4 * sum(adapter.num_values for adapter in opened)
    loaded = make_pass("llama3", make_native_ops)
    assert loaded.spec.adapter_ranks == described.adapter_ranks
    assert loaded.spec.weight_bytes == described.weight_bytes


def test_plan_counts_adapters_of_the_last_process_within_their_budget(tmp_path: Path) -> None:
    options = BackendOptions(gpu="none", lora_dir=tmp_path, lora_budget=10**9)
    settings, described = PassOptions(dtype="fp32", adapters=adapters("llama3")), []
    for num_kept in (0, 3):
        spec, _ = describe_pass(options, "decoder", CpuDecoderPass, checkpoint("llama3"), settings, num_kept)
        described.append(spec)
    plain = CpuDecoderPass.describe(checkpoint("llama3"), PassOptions(dtype="fp32"))
    kept_bytes = described[0].weight_bytes - plain.weight_bytes
    assert described[0].workspace_bytes - described[1].workspace_bytes == kept_bytes > 0
