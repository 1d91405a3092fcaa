"""Settings of single linears, of embeddings and in other files, by the methods that have them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.formats.declared import parse_stored_formats, read_stored_formats
from penstock.backend.checkpoint.formats.gptq import Gptq
from penstock.backend.checkpoint.quantization.modes import has_cpu_kernels
from penstock.backend.checkpoint.quantized_weights import GroupedWeight
from penstock.backend.checkpoint.weights import open_weights
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
        embedding, down = weights.embedding(torch.float32), weights.layer(0, torch.float32).down
        assert isinstance(embedding, GroupedWeight)
        assert isinstance(down, GroupedWeight)
        assert torch.equal(embedding.dequantize(), checkpoint.exact["model.embed_tokens.weight"].float())
        assert torch.equal(down.dequantize(), exact.float())
        assert isinstance(weights.layer(1, torch.float32).gate_up, torch.Tensor)


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
