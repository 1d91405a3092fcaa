"""Experts of a layer together in one tensor: gpt-oss (floats or MXFP4) and Qwen3-VL, against transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.backend.checkpoint.config.tensors import expected_tensors
from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.quantization.modes import has_cpu_kernels
from penstock.backend.checkpoint.weight_forms.quantized_weights import Mxfp4Weight
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from tests.backend.checkpoint.weight_files import open_checkpoint, rewrite
from tests.backend.passes.decoder.driver import Driver
from tests.backend.passes.decoder.quantized_oracle import relative_error
from tests.checkpoints import load_oracle, make_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

PUBLISHED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
START = "model.layers.1.mlp.experts."
MATRICES = ("gate_up_proj", "down_proj")


@dataclass
class Pair:
    """A checkpoint with experts in MXFP4, and one with the same numbers as floats, as transformers converts them."""

    packed: Path
    plain: Path


def write_pair(path: Path, exponents: tuple[int, int]) -> Pair:
    """With stored exponents of a range."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # takes seconds

    pair = Pair(make_checkpoint("gpt-oss", path / "packed"), make_checkpoint("gpt-oss", path / "plain"))
    tensors = load_file(pair.plain / "model.safetensors")
    packed, plain = dict(tensors), dict(tensors)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(MATRICES)]:
        experts, inputs, outputs = packed.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*shape, 16), generator=generator).byte()
        scales = torch.randint(*exponents, shape, generator=generator).byte()
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales).float().contiguous()
        assert plain[name].shape == tensors[name].shape
    for model_dir, content in ((pair.packed, packed), (pair.plain, plain)):
        save_file(content, model_dir / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((pair.packed / "config.json").read_text())
    (pair.packed / "config.json").write_text(json.dumps(config | {"quantization_config": PUBLISHED}))
    return pair


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_mxfp4_are_the_same_bits_as_in_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    """With all exponents: numbers so small that they are subnormal, and so large that they are infinite."""
    pair = write_pair(tmp_path, (0, 255))
    with open_checkpoint(pair.packed) as packed, open_checkpoint(pair.plain) as plain:
        found, expected = packed.layer(1, Dtype.of(dtype)), plain.layer(1, Dtype.of(dtype))
    for field in ("expert_gate_up", "expert_down", "expert_gate_up_bias", "expert_down_bias", "router", "qkv", "sinks"):
        bits = [getattr(layer, field).view(torch.int32) for layer in (found, expected)]
        assert torch.equal(*bits), field


def test_experts_of_floats_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Gate, then up, of each expert; outputs, then inputs. Everything in the file is used."""
    model_dir = make_checkpoint("gpt-oss", tmp_path)
    state = load_file(model_dir / "model.safetensors")
    assert {spec.stored_name for spec in expected_tensors(read_decoder_config(model_dir))} == set(state)
    with open_checkpoint(model_dir) as weights:
        layer = weights.layer(1, Dtype.FP32)
    assert layer.expert_gate_up is not None
    assert layer.expert_gate_up_bias is not None
    assert layer.expert_down is not None
    experts, biases = layer.expert_gate_up.view(5, 2, 96, 64), layer.expert_gate_up_bias.view(5, 2, 96)
    for part in (0, 1):
        assert torch.equal(experts[:, part].mT, state[f"{START}gate_up_proj"][..., part::2])
        assert torch.equal(biases[:, part], state[f"{START}gate_up_proj_bias"][..., part::2])
    assert torch.equal(layer.expert_down.view(5, 64, 96).mT, state[f"{START}down_proj"])


def test_logits_of_experts_in_mxfp4_are_near_those_of_transformers(tmp_path: Path) -> None:
    pair = write_pair(tmp_path, (122, 126))
    prompt = np.random.default_rng(0).integers(0, 256, 40).tolist()
    options = PassOptions(dtype="fp32", max_running=4, max_batch_tokens=64)
    forward_pass = CpuDecoderPass.load(pair.packed, options)
    assert forward_pass.spec == CpuDecoderPass.describe(pair.packed, options)
    driver = Driver(forward_pass, num_pages=8, page_size=16)
    row = driver.add(prompt)
    logits = driver.prefill()[row.slot]
    forward_pass.close()
    with torch.inference_mode():
        expected = load_oracle(pair.plain)(torch.tensor([prompt])).logits[0, -1].numpy()
    assert 0 < relative_error(logits, expected) < 0.03  # the kernels round activations to 8 bits


@pytest.mark.parametrize("exponents", [(104, 144), (103, 105), (143, 145)])
def test_experts_stay_in_mxfp4_where_the_kernels_hold_the_scales(exponents: tuple[int, int], tmp_path: Path) -> None:
    """A block of zeros may have any exponent."""
    packed = write_pair(tmp_path, exponents).packed
    name = START + "down_proj"
    stored = load_file(packed / "model.safetensors")
    blocks, scales = stored[f"{name}_blocks"], stored[f"{name}_scales"]
    blocks[3, 5, 1], scales[3, 5, 1] = 0x80, 0
    rewrite(packed / "model.safetensors", {f"{name}_blocks": blocks, f"{name}_scales": scales})
    config = read_decoder_config(packed)
    with open_checkpoint(packed) as dequantised, open_weights(packed, config, keeps=has_cpu_kernels) as kept:
        expected, found = dequantised.layer(1, Dtype.FP32), kept.layer(1, Dtype.FP32)
    for field in ("expert_gate_up", "expert_down"):
        weight = getattr(found, field)
        assert isinstance(weight, Mxfp4Weight if exponents == (104, 144) else torch.Tensor)
        assert torch.equal(
            weight if isinstance(weight, torch.Tensor) else weight.dequantize(), getattr(expected, field)
        )


@pytest.mark.parametrize(
    ("tensor", "change", "message"),
    [
        ("gate_up_proj_blocks", None, r"gate_up_proj_blocks, expected with shape \[5, 192, 2, 16\], is missing from"),
        ("gate_up_proj_scales", None, r"gate_up_proj_scales, expected with shape \[5, 192, 2\], is missing from"),
        ("gate_up_proj_bias", None, r"gate_up_proj_bias, expected with shape \[5, 192\], is missing from"),
        (
            "gate_up_proj_blocks",
            torch.zeros(5, 192, 3, 16).byte(),
            r"gate_up_proj_blocks has shape \[5, 192, 3, 16\]; mxfp4, MXFP4 in config.json makes it \[5, 192, 2, 16\]",
        ),
        (
            "gate_up_proj_blocks",
            torch.zeros(4, 192, 2, 16).byte(),
            r"gate_up_proj_blocks has shape \[4, 192, 2, 16\]; .* \[5, 192, 2, 16\]",
        ),
        ("down_proj_scales", torch.zeros(5, 64, 2).byte(), r"down_proj_scales has shape \[5, 64, 2\]; .* \[5, 64, 3\]"),
        ("down_proj_scales", torch.zeros(5, 64, 3), r"down_proj_scales has dtype 'F32'; it must be U8"),
        (
            "down_proj_scales",
            torch.full((5, 64, 3), 255).byte(),
            "down_proj of expert 0, .*scales has 255, which is not",
        ),
    ],
)
def test_wrong_tensor_of_experts_is_refused_by_name(
    tensor: str, change: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    packed = write_pair(tmp_path, (120, 130)).packed
    rewrite(packed / "model.safetensors", {START + tensor: change})
    with pytest.raises(StartupError, match=message), open_checkpoint(packed) as weights:
        weights.layer(1, Dtype.FP32)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mlp.experts.down_proj", torch.zeros(5, 64, 96), r"down_proj has shape \[5, 64, 96\]; .* \[5, 96, 64\]"),
        ("mlp.experts.down_proj_bias", torch.zeros(64), r"down_proj_bias has shape \[64\]; .* \[5, 64\]"),
        ("mlp.router.bias", None, r"router.bias, expected with shape \[5\], is missing"),
        ("self_attn.sinks", torch.zeros(4, 1), r"self_attn.sinks has shape \[4, 1\]; config.json makes it \[4\]"),
        ("self_attn.sinks", None, r"self_attn.sinks, expected with shape \[4\], is missing"),
    ],
)
def test_wrong_tensor_of_floats_is_refused_by_name(
    name: str, change: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    model_dir = make_checkpoint("gpt-oss", tmp_path)
    rewrite(model_dir / "model.safetensors", {f"model.layers.1.{name}": change})
    with pytest.raises(StartupError, match=message):
        open_checkpoint(model_dir)


def test_inputs_that_do_not_fill_blocks_are_refused(tmp_path: Path) -> None:
    model_dir = make_checkpoint("gpt-oss", tmp_path, hidden_size=48, num_hidden_layers=1)
    config = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(json.dumps(config | {"quantization_config": PUBLISHED}))
    message = r"gate_up_proj, mxfp4, MXFP4: 48 inputs are not a multiple of the numbers in a block, 32"
    with pytest.raises(StartupError, match=message):
        open_checkpoint(model_dir)


def test_both_orders_of_qwen3_vls_experts_are_the_same_weights(tmp_path: Path) -> None:
    saved = make_checkpoint("qwen3-vl-moe", tmp_path / "saved")
    other = make_checkpoint("qwen3-vl-moe", tmp_path / "other")
    tensors = load_file(saved / "model.safetensors")
    turned = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if name.endswith(MATRICES)}
    assert len(turned) == 4
    save_file(tensors | turned, other / "model.safetensors", metadata={"format": "pt"})
    layers = []
    for model_dir in (saved, other):
        with open_weights(model_dir, read_decoder_config(model_dir)) as weights:
            layers.append(weights.layer(0, Dtype.FP32))
    for name in ("expert_gate_up", "expert_down"):
        first, second = (getattr(layer, name) for layer in layers)
        assert torch.equal(first, second)


def test_square_matrices_of_either_order_are_refused(tmp_path: Path) -> None:
    model_dir = make_checkpoint("qwen3-vl-moe", tmp_path, hidden_size=80, head_dim=16, moe_intermediate_size=40)
    message = r"experts.gate_up_proj has shape \[9, 80, 80\], which does not tell inputs from outputs"
    with pytest.raises(StartupError, match=message), open_weights(model_dir, read_decoder_config(model_dir)) as weights:
        weights.layer(0, Dtype.FP32)
