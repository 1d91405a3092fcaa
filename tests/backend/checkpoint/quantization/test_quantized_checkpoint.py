"""Weights quantised while they are loaded, beside the exact ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.backend.checkpoint.config.tensors import LINEARS
from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.quantization.modes import QUANTIZATIONS, check_sizes, find_quantization, weight_bytes
from penstock.backend.checkpoint.quantization.quantized_checkpoint import open_quantized
from penstock.backend.checkpoint.weight_forms.float8_weight import Float8Weight
from penstock.backend.checkpoint.weight_forms.quantized_weights import Int4Weight, Int8Weight, QuantizedWeight
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from tests.backend.checkpoint.quantization.loading import load
from tests.backend.checkpoint.weight_files import rewrite
from tests.checkpoints import make_checkpoint

KINDS = {"int8": Int8Weight, "int4": Int4Weight, "fp8": Float8Weight}


@pytest.mark.parametrize("mode", KINDS)
@pytest.mark.parametrize("architecture", ["llama-bias", "qwen3", "phi3", "qwen2-moe"])
def test_linears_are_quantised_and_the_rest_is_exact(architecture: str, mode: str, tmp_path: Path) -> None:
    """The rest includes the router of experts, and the gate of a shared expert."""
    widths = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64} if architecture == "qwen2-moe" else {}
    model_dir = make_checkpoint(architecture, tmp_path / "model", max_shard_size="60KB", **widths)
    config = read_decoder_config(model_dir)
    with (
        open_weights(model_dir, config) as plain,
        open_quantized(model_dir, config, QUANTIZATIONS[mode]) as weights,
    ):
        for i in range(config.num_layers):
            exact, found = plain.layer(i, Dtype.FP32), weights.layer(i, Dtype.FP32)
            for name in exact.__slots__:
                if getattr(exact, name) is None:
                    assert getattr(found, name) is None
                elif name in LINEARS:
                    weight = getattr(found, name)
                    assert isinstance(weight, KINDS[mode])
                    check_near(weight, getattr(exact, name))
                else:
                    assert torch.equal(getattr(found, name), getattr(exact, name))
        assert torch.equal(weights.final_norm(Dtype.BF16), plain.final_norm(Dtype.FP32))
        table, head = weights.embedding(Dtype.FP32), weights.lm_head(Dtype.FP32)
        if config.tie_embeddings:
            assert isinstance(table, Float8Weight if mode == "fp8" else Int8Weight)
            assert head is None
            check_near(table, plain.embedding(Dtype.FP32))
        else:
            assert isinstance(head, Float8Weight if mode == "fp8" else Int8Weight)
            check_near(head, plain.lm_head(Dtype.FP32))
            assert torch.equal(table, plain.embedding(Dtype.FP32))  # type: ignore[arg-type]


def check_near(weight: QuantizedWeight, exact: Any) -> None:
    error = (weight.dequantize() - exact).norm() / exact.norm()
    assert 0 < error < (0.01 if isinstance(weight, Int8Weight) else 0.1)


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_tensor_that_is_not_finite_is_named(mode: str, model_dir: Path, cache: Path) -> None:
    up = torch.zeros(96, 64, dtype=torch.bfloat16)
    up[95, 3] = torch.nan
    rewrite(model_dir / "model.safetensors", {"model.layers.1.mlp.up_proj.weight": up})
    said = rf"--quantize is {mode}; tensor model\.layers\.1\.mlp\.up_proj\.weight has numbers that are not finite"
    with pytest.raises(StartupError, match=said):
        load(model_dir, mode)
    assert list(cache.iterdir()) == []


def test_inputs_that_no_groups_divide_are_refused(tmp_path: Path) -> None:
    model_dir = make_checkpoint("llama2", tmp_path / "model", intermediate_size=80)
    config = read_decoder_config(model_dir)
    with pytest.raises(StartupError, match=r"is int4-128; model\.layers\.0\.self_attn\.q_proj\.weight has 64 inputs"):
        open_quantized(model_dir, config, QUANTIZATIONS["int4-128"])
    said = r"mlp\.down_proj\.weight has 80 inputs, not a multiple of 32: use int8$"
    with pytest.raises(StartupError, match=said):
        open_quantized(model_dir, config, QUANTIZATIONS["int4"])


def test_unknown_mode_is_refused() -> None:
    assert find_quantization("none") is None
    with pytest.raises(StartupError, match="--quantize is int3; it must be none, int8, int4, int4-128, fp8"):
        find_quantization("int3")


def test_groups_that_do_not_divide_the_width_of_experts_are_refused(tmp_path: Path) -> None:
    config = read_decoder_config(make_checkpoint("qwen3-moe", tmp_path / "model"))
    said = r"mlp\.experts\.0\.down_proj\.weight has 40 inputs, not a multiple of 32: use int8$"
    with pytest.raises(StartupError, match=said):
        check_sizes(QUANTIZATIONS["int4"], config)


@pytest.mark.parametrize(
    ("architecture", "mode", "num_plain"),
    [
        *(("llama2", mode, 256 * 128 + 7 * 128) for mode in QUANTIZATIONS),
        ("qwen3-moe", "int4", 256 * 128 + 7 * 128 + 3 * 2 * 32 + 2 * 9 * 128),
    ],
)
def test_announced_bytes_are_those_of_the_tensors(architecture: str, mode: str, num_plain: int, tmp_path: Path) -> None:
    """Plain are the embedding, norms and routers."""
    experts = {"moe_intermediate_size": 64} if architecture == "qwen3-moe" else {}
    model_dir = make_checkpoint(architecture, tmp_path / "model", hidden_size=128, intermediate_size=256, **experts)
    config = read_decoder_config(model_dir)
    linears, _ = load(model_dir, mode)
    num_bytes = num_plain * 4  # in fp32
    for weight in linears.values():
        num_bytes += weight.values.numel()
        num_bytes += weight.scales.numel() * (2 if isinstance(weight, Int4Weight) else 4)
        num_bytes += weight.zeros.numel() if isinstance(weight, Int4Weight) else 0
    assert weight_bytes(config, Dtype.FP32, QUANTIZATIONS[mode]) == num_bytes
