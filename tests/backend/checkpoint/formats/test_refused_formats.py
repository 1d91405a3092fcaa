"""Quantised checkpoints that contradict their config.json, or that declare what is not supported."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.formats.declared import parse_stored_formats
from penstock.backend.checkpoint.formats.matrix_format import UnreadableMatrixError
from penstock.backend.checkpoint.quantization.modes import has_cpu_kernels
from penstock.backend.checkpoint.tensor_files.safetensors_file import SafetensorsFile
from penstock.backend.checkpoint.weights import open_weights
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from tests.backend.checkpoint.formats.quantizers import awq_gemv_fast, change_config, fp8, gptq, nf4, write_checkpoint
from tests.backend.checkpoint.weight_files import rewrite

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
FP8 = {"quant_method": "fp8", "weight_block_size": [64, 64]}
Q = "model.layers.0.self_attn.q_proj"


def read_all(path: Path) -> None:
    config = read_decoder_config(path)
    with open_weights(path, config, keeps=has_cpu_kernels) as weights:
        for index in range(config.num_layers):
            weights.layer(index, Dtype.FP32)


def bad(value: float) -> torch.Tensor:
    scales = torch.full((4, 128), 0.01, dtype=torch.float16)
    scales[1, 2] = value
    return scales


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        ("scales", torch.ones(8, 128).half(), r"q_proj\.scales has shape \[8, 128\]; GPTQ.*makes it \[4, 128\]"),
        ("scales", torch.ones(4, 128).int(), r"q_proj\.scales has dtype 'I32'; it must be F32, F16, BF16"),
        ("scales", bad(math.inf), r"q_proj\.scales has numbers that are not finite"),
        ("scales", bad(math.nan), r"q_proj\.scales has numbers that are not finite"),
        ("scales", None, r"q_proj\.scales, expected with shape \[4, 128\], is missing from"),
        ("qweight", torch.ones(16, 64).int(), r"q_proj\.qweight has shape \[16, 64\]"),
        ("qweight", None, r"q_proj\.qweight, expected with shape \[16, 128\], is missing"),
        ("qzeros", torch.ones(4, 8).int(), r"q_proj\.qzeros has shape \[4, 8\]; .*makes it \[4, 16\]"),
        ("g_idx", torch.full((128,), 4).int(), r"q_proj\.weight, GPTQ.*: g_idx has 4; it must be from 0 to 3"),
        ("g_idx", torch.full((128,), -1).int(), r"g_idx has -1; it must be from 0 to 3"),
    ],
)
def test_wrong_part_of_a_linear_is_refused_by_name(
    part: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path, GPTQ, gptq())
    rewrite(checkpoint.file, {f"{Q}.{part}": tensor})
    with pytest.raises(StartupError, match=message):
        read_all(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"group_size": 48},
            r"q_proj\.weight, GPTQ, 4 bits, groups of 48: 128 inputs are not a multiple of group_size",
        ),
        ({"group_size": 0}, "group_size is 0; it must be -1 or at least 1"),
        ({"group_size": 64}, r"q_proj\.qzeros has shape \[4, 16\]; GPTQ, 4 bits, groups of 64 in config.json"),
        ({"bits": 3}, "bits is 3; supported are 4, 8"),
        ({"bits": "4"}, "bits is '4'; expected `int`"),
        ({"desc_act": 1}, "desc_act is 1"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported are gptq, gptq_v2"),
        ({"lm_head": True}, r"lm_head\.qweight, expected with shape \[16, 256\], is missing"),
        ({"dynamic": {"+:.*": {"bits": 3}}}, r"dynamic\.'\+:\.\*'\.bits is 3; supported are 4, 8"),
        ({"dynamic": {".*": {"damp": 1}}}, r"dynamic\.'\.\*'.*damp"),
        ({"dynamic": {"+:.*q_proj": {"bits": 8}}}, r"q_proj\.qweight has shape \[16, 128\]; GPTQ, 8 bits"),
        ({"dynamic": {"-:(": {}}}, r"the expression '\(' is invalid"),
        ({"dynamic": {"-:.*q_proj": {}}}, r"q_proj\.weight, expected with shape \[128, 128\], is missing"),
        ({"modules_in_block_to_quantize": [["mlp.up_proj"]]}, r"q_proj\.weight, expected .* is missing"),
        ({"quant_method": "awq"}, r"q_proj\.qweight has shape \[16, 128\]; AWQ.*makes it \[128, 16\]"),
        ({"quant_method": None}, "quant_method is None; supported are compressed-tensors, gptq, awq, fp8"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    change_config(write_checkpoint(tmp_path, GPTQ, gptq()), **changes)
    with pytest.raises(StartupError, match=message):
        read_all(tmp_path)


def test_missing_expert_of_a_quantised_layer_is_refused_by_name(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "mlp_only_layers": []}
    plain = ("lm_head", "embed_tokens", "mlp.gate")
    checkpoint = write_checkpoint(tmp_path, GPTQ, gptq(), plain=plain, architecture="qwen3-moe", **experts)
    read_all(tmp_path)
    rewrite(checkpoint.file, {"model.layers.1.mlp.experts.3.down_proj.qweight": None})
    with pytest.raises(
        StartupError, match=r"layers\.1\.mlp\.experts\.3\.down_proj\.qweight, expected .* is missing from"
    ):
        read_all(tmp_path)


@pytest.mark.parametrize("qzero", [-0.53125, 0.0625, -1.0])
def test_zero_point_that_is_no_integer_of_four_bits_is_refused(qzero: float, tmp_path: Path) -> None:
    """The zero points, in AWQ's gemv_fast with a scale of 1/16, are 8.5, -1 and 16."""
    config = {"quant_method": "awq", "version": "gemv_fast", "bits": 4, "group_size": 64}
    checkpoint = write_checkpoint(tmp_path, config, awq_gemv_fast(64))
    read_all(tmp_path)
    parts = {f"{Q}.{part}": load_file(checkpoint.file)[f"{Q}.{part}"] for part in ("scales", "qzeros")}
    parts[f"{Q}.scales"][1, 3], parts[f"{Q}.qzeros"][1, 3] = 0.0625, qzero
    rewrite(checkpoint.file, parts)
    found = re.escape(f"qzeros[1, 3] is {qzero:.5g}; it must be the scale, 0.0625, times an integer from -15 to 0")
    with pytest.raises(StartupError, match=rf"q_proj\.weight, AWQ gemv_fast, 4 bits, groups of 64: {found}"):
        read_all(tmp_path)


def note(**changes: Any) -> torch.Tensor:
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [128, 128], "nested_blocksize": 256, "nested_offset": 0.1}
    return torch.frombuffer(bytearray(json.dumps(state | changes).encode()), dtype=torch.uint8)


STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("part", "tensor", "message"),
    [
        (STATE, note(blocksize=128), r"q_proj\.weight, bitsandbytes, nf4.*: blocksize is 128; it must be 64"),
        (STATE, note(shape=[64, 256]), r"shape is \[64, 256\]; it must be \[128, 128\]"),
        (STATE, note(nested_offset="x"), "nested_offset is 'x'; it must be a finite number"),
        (STATE, torch.zeros(20, dtype=torch.uint8), "its quant_state is not a JSON object"),
        (
            STATE,
            torch.zeros(5000, dtype=torch.uint8),
            r"nf4 has shape \[5000\]; .* makes it \[up to 4096\]",
        ),
        (STATE, None, r"nf4, expected with shape \[up to 4096\], is missing"),
        ("weight.absmax", torch.zeros(255, dtype=torch.uint8), r"absmax has shape \[255\]; .*makes it \[256\]"),
        ("weight.absmax", torch.zeros(256), "absmax has dtype 'F32'; it must be U8"),
        ("weight.nested_absmax", torch.full((1,), math.nan), "nested_absmax has numbers that are not finite"),
    ],
)
def test_wrong_part_of_an_nf4_linear_is_refused_by_name(
    part: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    checkpoint = write_checkpoint(tmp_path, {"quant_method": "bitsandbytes"} | settings, nf4(nested=True))
    read_all(tmp_path)
    rewrite(checkpoint.file, {f"{Q}.{part}": tensor})
    with pytest.raises(StartupError, match=message):
        read_all(tmp_path)


def test_linear_that_is_listed_as_plain_is_read_plain(tmp_path: Path) -> None:
    plain = ("lm_head", "embed_tokens", "o_proj", "layers.1.mlp")
    checkpoint = write_checkpoint(tmp_path, FP8, fp8((64, 64)), plain=plain)
    change_config(checkpoint, modules_to_not_convert=["o_proj", "model.layers.1.mlp"])
    read_all(tmp_path)
    change_config(checkpoint, modules_to_not_convert=["o_proj", "model.layers.1"])
    with pytest.raises(StartupError, match=r"layers\.1\.self_attn\.q_proj\.weight has dtype 'F8_E4M3'; it must be F32"):
        read_all(tmp_path)


def test_truncated_file_is_refused_with_both_sizes(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, GPTQ, gptq())
    data = checkpoint.file.read_bytes()
    checkpoint.file.write_bytes(data[:-1])
    with pytest.raises(StartupError, match=f"is truncated: expected {len(data)} bytes, found {len(data) - 1}"):
        read_all(tmp_path)


WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel"}


def compressed(layout: str = "int-quantized", **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": WEIGHTS | weights}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (compressed("marlin-24"), r"group_0\.format is 'marlin-24'; supported are int-quantized"),
        (
            compressed("nvfp4-pack-quantized", type="float", num_bits=4, group_size=32),
            "group_size is 32; supported are 16",
        ),
        (compressed(num_bits=4), r"group_0\.weights\.num_bits is 4; supported are 8"),
        (compressed("pack-quantized", num_bits=3), "num_bits is 3; supported are 4, 8"),
        (compressed(type="complex"), "type is 'complex'; supported are int, float"),
        (compressed(type="float", num_bits=4), "num_bits is 4; supported are 8"),
        (
            compressed(type="float", strategy="group", group_size=8),
            "strategy is 'group'; supported are tensor, channel, block",
        ),
        (compressed(strategy="group"), "group_size is missing for strategy group"),
        (compressed(type="float", strategy="block"), "block_structure is missing for strategy block"),
        (compressed(strategy="block", block_structure=[1, 0]), r"block_structure\[1\] is 0|block_structure"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format is"),
        (compressed() | {"ignore": ["re:("]}, r"the expression '\(' is invalid"),
        (
            compressed("mxfp4-pack-quantized", type="float", num_bits=4, group_size=16),
            "group_size is 16; supported are 32",
        ),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit is False; supported are True"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "x"}, "quant_type is 'x'"),
        ({"quant_method": "awq", "version": "marlin"}, "version is 'marlin'; supported are gemm, gemv, gemv_fast"),
        ({"quant_method": "awq", "backend": "llm-awq"}, 'backend is "llm-awq"'),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        (
            {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
            "quant_algo is 'W4A16_AWQ'; supported are FP8,",
        ),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quantized_layers is missing"),
        ({"quant_method": "auto-round", "bits": 2}, "bits is 2; supported are 4, 8"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type is 'mx_fp'; supported are int"),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:fp8"},
            "packing_format is",
        ),
        ({"quant_method": "mlx", "bits": 4, "group_size": 48}, "group_size is 48; supported are 32, 64, 128"),
        (
            {"quant_method": "mlx", "bits": 4, "group_size": 16, "mode": "nvfp4"},
            "mode is 'nvfp4'; supported",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
    ],
)
def test_format_that_is_not_supported_is_refused_with_its_setting(config: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        parse_stored_formats({"quantization_config": config}).of(f"{Q}.weight")


SCALARS = st.none() | st.booleans() | st.integers(-2, 300) | st.sampled_from(["group", "re:.*q", "gemm", 1e300, 10**40])
JSON = SCALARS | st.lists(SCALARS, max_size=3)
WEIGHT_KEYS = ("num_bits", "type", "strategy", "group_size", "block_structure", "actorder", "symmetric")
KEYS = ("bits", "group_size", "desc_act", "lm_head", "dynamic", "weight_block_size", "ignore", "format", "version")


@given(
    st.sampled_from(["gptq", "awq", "fp8", "compressed-tensors", "modelopt", "auto-round", "mlx"]),
    st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4),
    st.dictionaries(st.sampled_from(WEIGHT_KEYS), JSON, max_size=4),
    st.sampled_from(["int-quantized", "pack-quantized", "float-quantized"]),
)
def test_any_settings_give_formats_or_a_startup_error(
    method: str, settings: dict[str, Any], weights: dict[str, Any], layout: str
) -> None:
    config = {"bits": 4} | compressed(layout, **weights) | {"quant_method": method} | settings
    try:
        matrix = parse_stored_formats({"quantization_config": config}).of(f"{Q}.weight")
        if matrix is not None:
            assert all(min(shape, default=1) > 0 for part in matrix.parts((64, 96)).values() for shape in part.shapes)
    except (StartupError, UnreadableMatrixError):
        return


@pytest.mark.parametrize("begin", [0, 1])
def test_tensors_that_share_bytes_are_refused(begin: int, tmp_path: Path) -> None:
    entries = {"a": (0, 4), "b": (begin, begin + 3)}
    header = {
        name: {"dtype": "U8", "shape": [end - first], "data_offsets": [first, end]}
        for name, (first, end) in entries.items()
    }
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(StartupError, match=r"tensor [ab] begins at byte \d+, within [ab], which ends at \d+"):
        SafetensorsFile(path)
