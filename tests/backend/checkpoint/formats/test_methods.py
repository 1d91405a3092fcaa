"""Settings of single linears, of embeddings and in other files, by the methods that have them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.formats.declared import parse_stored_formats, read_stored_formats
from penstock.backend.checkpoint.formats.methods.gptq import Gptq
from penstock.backend.checkpoint.quantization.modes import has_cpu_kernels
from penstock.backend.checkpoint.weight_forms.quantized_weights import GroupedWeight
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.dtypes import Dtype
from tests.backend.checkpoint.formats.quantizers import mlx, write_checkpoint
from tests.backend.checkpoint.formats.test_stored_formats import AUTO_ROUND
from tests.backend.checkpoint.weight_files import rewrite

if TYPE_CHECKING:
    from pathlib import Path


def test_model_of_mlx_has_a_quantised_embedding(tmp_path: Path) -> None:
    """It is the output layer as well. One linear has its own bits, and one none."""
    own = {"model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 32}, "model.layers.1.mlp.up_proj": False}
    plain = ("layers.1.mlp.up_proj", "layers.0.mlp.down_proj")
    checkpoint = write_checkpoint(
        tmp_path, {"bits": 4, "group_size": 64, **own}, mlx(4, 64), plain=plain, architecture="llama-tied"
    )
    name = "model.layers.0.mlp.down_proj"
    parts, exact = mlx(8, 32)(np.random.default_rng(1), 128, 256)
    rewrite(checkpoint.file, {f"{name}.{part}": value for part, value in parts.items()})
    with open_weights(checkpoint.path, read_decoder_config(checkpoint.path), keeps=has_cpu_kernels) as weights:
        embedding, down = weights.embedding(Dtype.FP32), weights.layer(0, Dtype.FP32).down
        assert isinstance(embedding, GroupedWeight)
        assert isinstance(down, GroupedWeight)
        assert torch.equal(embedding.dequantize(), checkpoint.exact["model.embed_tokens.weight"].float())
        assert torch.equal(down.dequantize(), exact.float())
        assert isinstance(weights.layer(1, Dtype.FP32).gate_up, torch.Tensor)


@pytest.mark.parametrize(
    ("architecture", "stack", "router"),
    [
        ("qwen3-moe", "mlp.switch_mlp", "mlp.gate"),
        ("mixtral", "block_sparse_moe.switch_mlp", "block_sparse_moe.gate"),
        ("gpt-oss", "mlp.experts", "mlp.router"),
    ],
)
def test_experts_of_mlx_are_kept_in_their_bits(architecture: str, stack: str, router: str, tmp_path: Path) -> None:
    """All of a layer's experts are in one tensor. The router has bits of its own, and so have some experts."""
    start, wide = "model.layers.1.", {"bits": 8, "group_size": 32}
    own = {f"{start}{router}": wide, f"{start}{stack}.down_proj": wide}
    config = {"bits": 4, "group_size": 32, **own}
    checkpoint = write_checkpoint(
        tmp_path, config, mlx(4, 32), architecture=architecture, moe_intermediate_size=64, mlp_only_layers=[]
    )
    decoder = read_decoder_config(tmp_path)
    assert decoder.experts is not None
    count, width, hidden = decoder.experts.count, decoder.experts.width, decoder.hidden_size
    stored = load_file(checkpoint.file)
    tensors = {name: value for name, value in stored.items() if ".experts." not in name}
    exact: dict[str, torch.Tensor] = {}
    rng = np.random.default_rng(1)
    for layer in ("model.layers.0.", start):
        for linear, shape in (
            ("gate_proj", (width, hidden)),
            ("up_proj", (width, hidden)),
            ("down_proj", (hidden, width)),
        ):
            quantize = mlx(8, 32) if f"{layer}{stack}.{linear}" in own else mlx(4, 32)
            parts, numbers = zip(*(quantize(rng, *shape) for _ in range(count)), strict=True)
            tensors |= {
                f"{layer}{stack}.{linear}.{part}": torch.stack([each[part] for each in parts]) for part in parts[0]
            }
            exact[f"{layer}{linear}"] = torch.stack(numbers).float()
            if decoder.experts.biased:
                tensors[f"{layer}{stack}.{linear}.bias"] = torch.randn(count, shape[0])
    parts, numbers = mlx(8, 32)(rng, count, hidden)
    tensors |= {f"{start}{router}.{part}": value for part, value in parts.items()}
    save_file(tensors, checkpoint.file, metadata={"format": "pt"})
    with open_weights(tmp_path, decoder, keeps=has_cpu_kernels) as weights:
        layer = weights.layer(1, Dtype.FP32)
    assert isinstance(layer.expert_gate_up, GroupedWeight)
    assert isinstance(layer.expert_down, GroupedWeight)
    gate_up = torch.cat([exact[f"{start}gate_proj"], exact[f"{start}up_proj"]], dim=1)
    assert torch.equal(layer.expert_gate_up.dequantize(), gate_up.view(-1, hidden))
    assert torch.equal(layer.expert_down.dequantize(), exact[f"{start}down_proj"].view(-1, width))
    assert torch.equal(layer.router, numbers.float())
    if decoder.experts.biased:
        biases = [tensors[f"{start}{stack}.{linear}.bias"] for linear in ("gate_proj", "up_proj")]
        assert torch.equal(layer.expert_gate_up_bias, torch.cat(biases, dim=1).view(-1))


def test_settings_of_modelopt_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    """Algorithms are by linear in it."""
    linears = {"model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}, "lm_head": {"quant_algo": "NVFP4"}}
    settings = {"quant_algo": "MIXED_PRECISION", "quantized_layers": linears}
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    formats = read_stored_formats(tmp_path)
    found = [formats.of(f"{name}.weight") for name in (*linears, "model.layers.0.mlp.down_proj")]
    assert [None if matrix is None else matrix.description for matrix in found] == [
        "modelopt, E4M3, one scale per matrix",
        "modelopt, NVFP4",
        None,
    ]


def test_auto_round_has_settings_by_linear() -> None:
    extra = {
        "model.layers.0.mlp.up_proj": {"bits": 16, "data_type": "fp"},
        r".*self_attn\.q_proj": {"bits": 8, "group_size": -1},
        "lm_head": {"bits": 4},
    }
    formats = parse_stored_formats({"quantization_config": AUTO_ROUND | {"extra_config": extra}})
    start = "model.layers.0."
    assert formats.of(f"{start}mlp.up_proj.weight") is None
    assert formats.of(f"{start}self_attn.q_proj.weight") == Gptq(8, None, act_order=False, zero_offset=1)
    assert formats.of("lm_head.weight") == formats.of(f"{start}mlp.down_proj.weight")
    blocks = {"block_name_to_quantize": "model.layers.1,model.layers.2"}
    formats = parse_stored_formats({"quantization_config": AUTO_ROUND | blocks})
    found = [formats.of(f"model.layers.{i}.mlp.up_proj.weight") is not None for i in range(4)]
    assert found == [False, True, True, False]
