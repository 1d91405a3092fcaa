"""CpuDecoderPass with quantised linears, against transformers with the same weights and int8 activations."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.quantization import cached_file
from penstock.backend.checkpoint.quantization.modes import find_cpu_quantization, linear_specs
from penstock.backend.checkpoint.quantization.quantized_checkpoint import open_quantized
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.cpu.in_torch.torch_ops import TorchOps
from penstock.backend.passes.decoder import cpu_pass as forward_pass
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from tests.backend.passes.conftest import MakeOps, make_deterministic_ops, make_native_ops, make_torch_ops
from tests.backend.passes.decoder.driver import Driver
from tests.backend.passes.decoder.quantized_oracle import QuantizedExperts, relative_error, replace_linear
from tests.checkpoints import load_oracle, make_checkpoint
from tests.presets import EXPERT_PRESETS
from tests.temporary import make_shared_directory

MODES = ("int8", "int4")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels stay in the user's cache: compiling them takes long."""
    monkeypatch.setattr(cached_file, "cache_directory", lambda: tmp_path)


@cache
def checkpoint(architecture: str) -> Path:
    overrides = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    experts = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
    own = {"gemma4-moe": {"moe_intermediate_size": 96}}.get(architecture, {})
    return make_checkpoint(
        architecture, make_shared_directory(), **overrides | (experts if architecture in EXPERT_PRESETS else own)
    )


def make_pass(architecture: str, mode: str, make_ops: MakeOps, dtype: torch.dtype = torch.float32) -> CpuDecoderPass:
    model_dir, quantization = checkpoint(architecture), find_cpu_quantization(mode)
    config = read_decoder_config(model_dir)
    with open_quantized(model_dir, config, quantization) as weights:
        ops = make_ops(config, dtype)
        return CpuDecoderPass(config, weights, ops, Dtype.of(dtype), max_running=32, quantization=quantization)


@cache
def oracle(architecture: str, mode: str) -> Any:
    """The transformers model with our quantised weights, which other tests compare with the original ones."""
    model_dir = checkpoint(architecture)
    config = read_decoder_config(model_dir)
    model = load_oracle(model_dir)
    with open_quantized(model_dir, config, find_cpu_quantization(mode)) as weights:
        for index, layer in enumerate(model.model.layers):
            if config.experts_of_layer(index) is not None:
                gate_up, down = (weights._linear(f"layers.{index}.expert_{part}") for part in ("gate_up", "down"))
                owner = layer if hasattr(layer, "experts") else layer.mlp
                owner.experts = QuantizedExperts(gate_up.dequantize(), down.dequantize(), owner.experts)
        for name, specs in linear_specs(config).items():
            if "expert_" in name:
                continue
            rows = weights._linear(name).dequantize().split([spec.shape[0] for spec in specs])
            for spec, part in zip(specs, rows, strict=True):
                replace_linear(model, spec.name.removesuffix(".weight"), part)
    return model


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, n).tolist() for n in lengths]


def run(driver: Driver, batch: list[list[int]], chunk: int | None = None) -> list[NDArray[np.float32]]:
    """The logits of each prompt's last token."""
    rows = [driver.add(prompt) for prompt in batch]
    logits = driver.prefill(chunk)
    return [logits[row.slot] for row in rows]


@pytest.fixture(params=[make_deterministic_ops, make_native_ops])
def make_deterministic(request: pytest.FixtureRequest) -> MakeOps:
    make: MakeOps = request.param
    return make


CASES = [
    ("llama-bias", torch.float32),
    ("qwen3", torch.float32),
    ("phi3", torch.bfloat16),
    ("glm", torch.float32),
    ("starcoder2", torch.float32),
    ("gemma2", torch.float32),
    ("qwen3-moe", torch.float32),
    ("qwen2-moe", torch.bfloat16),
    ("gpt-oss", torch.float32),
    ("gemma3n", torch.float32),
    ("gemma4-e", torch.float32),
    ("gemma4-moe", torch.float32),
    ("qwen3.5", torch.float32),
    ("qwen3-next", torch.float32),
]
"""With biases and an lm_head of its own; with a tied embedding; with stacked tensors; with rows in another order; with
a plain MLP; with norms of products, soft caps and a scaled embedding; with experts; with a shared one beside them; with
biases of experts; with several residual streams; with inputs of layers and shared keys; with experts beside the MLP;
with delta rules, of one with rows in another order."""


@pytest.mark.parametrize(
    ("architecture", "dtype", "mode", "make_ops"),
    [
        (*case, mode, make)
        for i, case in enumerate(CASES)
        for place, mode in enumerate(MODES)
        for make in ((make_native_ops, make_torch_ops) if place == i % 2 else (make_native_ops,))
    ],
)
def test_logits_are_those_of_the_same_weights_in_transformers(
    architecture: str, dtype: torch.dtype, mode: str, make_ops: MakeOps
) -> None:
    """Each case in both modes on this machine's kernels, and in one of them in torch."""
    batch = prompts((1, 2, 3, 7, 33))
    driver = Driver(make_pass(architecture, mode, make_ops, dtype), num_pages=32, page_size=16)
    errors = []
    for prompt, logits in zip(batch, run(driver, batch), strict=True):
        with torch.inference_mode():
            exact = oracle(architecture, mode)(torch.tensor([prompt])).logits[0, -1].numpy()
        errors.append(relative_error(logits, exact))
    # Where a number lies halfway between two steps, it may be rounded either way, and all that follows changes a bit.
    assert max(errors) < (0.05 if dtype is torch.float32 else 0.15)
    assert dtype is torch.bfloat16 or sorted(errors)[1] < 1e-5


@pytest.mark.parametrize(("architecture", "mode"), [("qwen3", "int8"), ("qwen3", "int4"), ("qwen3-moe", "int4")])
def test_row_is_the_same_bits_alone_in_a_batch_and_in_chunks(
    architecture: str, mode: str, make_deterministic: MakeOps
) -> None:
    """Compares prefill and decode, in other pages, with a tied embedding."""
    prompt, *others = prompts((37, *range(1, 60, 7)), seed=2)
    alone, busy, chunked = (
        Driver(make_pass(architecture, mode, make_deterministic, torch.bfloat16), 64, 16, "q8_0", seed)
        for seed in (0, 9, 5)
    )
    expected = run(alone, [prompt])[0]
    np.testing.assert_array_equal(run(busy, [*others[:3], prompt, *others[3:]])[3], expected)
    np.testing.assert_array_equal(run(chunked, [prompt, others[0]], chunk=7)[0], expected)
    for _ in range(4):
        expected = alone.step([(alone.rows[0], 1)])[0]
        np.testing.assert_array_equal(busy.step([(row, 1) for row in busy.rows])[3], expected)
        np.testing.assert_array_equal(chunked.step([(row, 1) for row in chunked.rows])[0], expected)


@pytest.mark.parametrize("mode", MODES)
def test_pass_without_native_kernels_runs_the_same_weights_in_torch(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_pass, "load_kernels", lambda *_: None)
    loaded = CpuDecoderPass.load(checkpoint("qwen3"), PassOptions(dtype="fp32", quantize=mode))
    assert isinstance(loaded._ops, TorchOps)
    assert loaded.spec.quantization == mode
    with torch.inference_mode():
        exact = oracle("qwen3", mode)(torch.tensor([[5]])).logits[0, -1].numpy()
    found = run(Driver(loaded, num_pages=4, page_size=16), [[5]])[0]
    assert relative_error(found, exact) < 1e-5


def test_specs_announce_quantised_weights() -> None:
    model_dir = checkpoint("qwen3")
    plain, int8, int4 = (
        CpuDecoderPass.describe(model_dir, PassOptions(dtype="bf16", quantize=mode)) for mode in ("none", *MODES)
    )
    assert [spec.quantization for spec in (plain, int8, int4)] == ["none", *MODES]
    assert int4.weight_bytes < int8.weight_bytes < 0.55 * plain.weight_bytes
    assert CpuDecoderPass.load(model_dir, PassOptions(dtype="bf16", quantize="int4")).spec == int4
    assert int4.kv_bytes_per_token == plain.kv_bytes_per_token


def test_modes_that_do_not_fit_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((make_checkpoint("llama2", tmp_path / "m") / "config.json").read_text())
    with pytest.raises(StartupError, match=r"is int4-128; .*q_proj\.weight has 64 inputs, not a multiple of 128: use"):
        CpuDecoderPass.describe(tmp_path, PassOptions(quantize="int4-128"))
    with pytest.raises(StartupError, match="--quantize is int3; it must be none, int8, int4, int4-128, fp8"):
        CpuDecoderPass.describe(tmp_path, PassOptions(quantize="int3"))
    with pytest.raises(StartupError, match="--quantize is fp8; the CPU has no products with 8-bit floats: use int8"):
        CpuDecoderPass.describe(tmp_path, PassOptions(quantize="fp8"))
