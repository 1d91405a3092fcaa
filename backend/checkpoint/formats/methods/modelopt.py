"""NVIDIA's ModelOpt: 8-bit floats, or NVFP4, with names of plain linears that have wildcards."""

from __future__ import annotations

import fnmatch
from functools import partial
from typing import Annotated, Any

from msgspec import Meta, Struct

from penstock.backend.checkpoint.files.json_file import convert
from penstock.backend.checkpoint.formats.matrix_format import MatrixFormat
from penstock.backend.checkpoint.formats.methods.settings import Names, one_of
from penstock.backend.checkpoint.formats.module_names import is_excluded, is_target
from penstock.backend.checkpoint.formats.numbers.float4 import Nvfp4
from penstock.backend.checkpoint.formats.numbers.float8 import Float8
from penstock.backend.checkpoint.formats.stored_formats import Rule, StoredFormats
from penstock.backend.errors import StartupError

_NVFP4 = Nvfp4("modelopt", "weight", "weight_scale_2", multiplies=True)
_MATRICES: dict[str, MatrixFormat] = {
    "FP8": Float8("modelopt", None, ("weight_scale",)),
    "FP8_PER_CHANNEL_PER_TOKEN": Float8("modelopt", None, ("weight_scale",), per_output=True),
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
}
_MIXED = "MIXED_PRECISION"


class _Layer(Struct, frozen=True):
    quant_algo: str


class _Settings(Struct, frozen=True):
    quant_algo: str
    exclude_modules: Names | None = None
    ignore: Names | None = None
    """exclude_modules in config.json."""
    quantized_layers: Annotated[dict[str, _Layer], Meta(max_length=1 << 16)] | None = None
    """The linears of MIXED_PRECISION."""


def read_modelopt(values: dict[str, Any]) -> StoredFormats:
    """Settings from quantization_config, or from "quantization" in hf_quant_config.json.

    Raises StartupError.
    """
    settings = convert(values.get("quantization", values), _Settings, "quantization_config")
    excluded = settings.exclude_modules or settings.ignore or ()
    plain = tuple(name for name in excluded if "*" not in name)
    wildcards = tuple(f"re:{fnmatch.translate(name)}" for name in excluded if "*" in name)

    def covers(module: str) -> bool:
        return not is_excluded(module, plain) and not is_target(module, wildcards)

    if settings.quant_algo.upper() != _MIXED:
        algorithm = one_of("quant_algo", settings.quant_algo.upper(), (*_MATRICES, _MIXED))
        # Activations are rounded to the same 8 bits: to a recorded scale, or a row's own, which is finer.
        return StoredFormats((Rule(_MATRICES[algorithm], covers),), rounds_rows=algorithm.startswith("FP8"))
    if not settings.quantized_layers:
        raise StartupError(f"quantization_config.quantized_layers is missing for quant_algo {_MIXED}")
    names: dict[str, list[str]] = {}
    for name, layer in settings.quantized_layers.items():
        names.setdefault(one_of("quantized_layers", layer.quant_algo.upper(), tuple(_MATRICES)), []).append(name)
    return StoredFormats(
        tuple(Rule(_MATRICES[algorithm], partial(_is_one_of, frozenset(each))) for algorithm, each in names.items())
    )


def _is_one_of(names: frozenset[str], module: str) -> bool:
    return is_target(module, names)
