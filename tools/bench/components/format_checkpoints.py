"""Checkpoints of random weights in the quantised formats of other programs, for `penstock bench formats`.

The formats themselves list the tensors of a linear; here they are filled with random bits and small scales. Weights in
GGML's block types are in a safetensors file, as rows of the same bytes.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from penstock.backend.checkpoint.config_json import read_decoder_config
from penstock.backend.checkpoint.formats.declared import parse_stored_formats
from penstock.backend.checkpoint.formats.ggml import BLOCK_TYPES, GgmlMatrix
from penstock.backend.checkpoint.layout import CONFIG_FILE, SINGLE_FILE
from penstock.backend.checkpoint.tensors import EMBEDDING, linear_names

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from penstock.backend.checkpoint.formats.matrix_format import MatrixFormat, Part, Shape
    from penstock.backend.checkpoint.formats.stored_formats import StoredFormats

SCALE_BYTES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "IQ4_NL": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,),
    "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""First bytes of the binary16 numbers in a block of each GGML type."""
_SYMMETRIC_ZEROS = 0x77
"""Zero points of 8 in GPTQ's format, which stores one less."""
_SCALE = 2e-3
_BLOCK_SCALE = 1e-4
_E2M1_EXPONENT = 120
"""A biased exponent of MXFP4, which means 2^-7."""
_FINITE_E4M3_BITS = 0b10111111
"""Bytes that use only these bits are below 2."""


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
_MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}

FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "gptq": _GPTQ,
    "gptq-act-order": _GPTQ | {"desc_act": True},
    "gptq-int8": _GPTQ | {"bits": 8},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
    "w8a8": _compressed("int-quantized", **_INT8),
    "w4a16": _compressed("pack-quantized", **_INT4),
    "float8": _compressed("float-quantized", **_FLOAT8),
    "mxfp4": _compressed("mxfp4-pack-quantized", **_MXFP4),
    "nvfp4": _compressed("nvfp4-pack-quantized", **_NVFP4),
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "llm-int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
} | {f"gguf-{name}": {"quant_method": "gguf", "types": {name: []}} for name in BLOCK_TYPES}
"""Name → quantization_config; the lists of GGUF's linears are empty here."""


def write_in_format(plain: Path, name: str, out: Path) -> None:
    """Write the model in plain, a directory with one file of weights, to the new directory out."""
    shutil.copytree(plain, out, ignore=shutil.ignore_patterns(SINGLE_FILE))
    decoder = read_decoder_config(plain)
    covered = [weight.removesuffix(".weight") for weight in linear_names(decoder)]
    config = json.loads((out / CONFIG_FILE).read_text())
    settings = dict(FORMATS[name])
    if "types" in settings:
        tied = [EMBEDDING.removesuffix(".weight")] if decoder.tie_embeddings else []
        settings["types"] = dict.fromkeys(settings["types"], covered + tied)
        config["rope_interleave"] = True
    if settings:
        config["quantization_config"] = settings
    (out / CONFIG_FILE).write_text(json.dumps(config))
    formats = parse_stored_formats(config)
    tensors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for weight, tensor in load_file(plain / SINGLE_FILE).items():
        matrix = _format_of(weight, covered, formats)
        if matrix is None:
            tensors[weight] = tensor
            continue
        outputs, inputs = tensor.shape
        parts = _random_parts(matrix, (outputs, inputs), generator)
        tensors |= {f"{weight.removesuffix('.weight')}.{part}": content for part, content in parts.items()}
    save_file(tensors, out / SINGLE_FILE, metadata={"format": "pt"})


def _format_of(weight: str, covered: list[str], formats: StoredFormats) -> MatrixFormat | None:
    is_linear = weight.removesuffix(".weight") in covered
    return formats.of(weight) if is_linear or (weight == EMBEDDING and formats.cover_embedding) else None


def _random_parts(matrix: MatrixFormat, shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
    parts = {name: part for name, part in matrix.parts(shape).items() if not part.optional}
    return {name: _random_part(matrix, name, part, shape, generator) for name, part in parts.items()}


def _random_part(matrix: MatrixFormat, name: str, part: Part, shape: Shape, generator: torch.Generator) -> Tensor:
    if name == "g_idx":
        groups = matrix.parts(shape)["scales"].shapes[0][0]
        return (torch.randperm(shape[1], generator=generator) % groups).int()
    if name == "weight.quant_map":
        return torch.linspace(-1, 1, 16)
    if "quant_state" in name:
        state = {"quant_type": "nf4", "blocksize": 64, "shape": list(shape)}
        return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    size = part.shapes[0]
    if name == "weight_global_scale":
        return torch.full(size, 1 / _SCALE)
    if {"F16", "F32"} & set(part.dtypes):
        return torch.full(size, _SCALE, dtype=torch.float16 if "F16" in part.dtypes else torch.float32)
    if name == "weight_scale" and part.dtypes == ("U8",):
        return torch.full(size, _E2M1_EXPONENT, dtype=torch.uint8)
    num_bytes = 4 if part.dtypes == ("I32",) else 1
    content = torch.randint(0, 256, (*size[:-1], size[-1] * num_bytes), dtype=torch.uint8, generator=generator)
    if name == "qzeros":
        content.fill_(_SYMMETRIC_ZEROS)
    if part.dtypes == ("F8_E4M3",):
        return (content & _FINITE_E4M3_BITS).view(torch.float8_e4m3fn)
    if isinstance(matrix, GgmlMatrix):
        _set_block_scales(matrix.type_name, content)
    return content.view({"I32": torch.int32, "I8": torch.int8, "U8": torch.uint8}[part.dtypes[0]])


def _set_block_scales(type_name: str, content: Tensor) -> None:
    """Make the scales of GGML's blocks small."""
    blocks = content.view(-1, BLOCK_TYPES[type_name].num_bytes)
    if type_name == "MXFP4":
        blocks[:, 0] = _E2M1_EXPONENT
    if type_name == "IQ1_M":
        blocks[:, 55] &= 15  # the upper bits of its scale, which is in four parts
    for first in SCALE_BYTES.get(type_name, ()):
        blocks[:, first : first + 2] = torch.full((len(blocks), 1), _BLOCK_SCALE, dtype=torch.float16).view(torch.uint8)
