"""Reads quantization_config of a checkpoint's config.json: which linears are stored quantised, and how.

The format is never guessed from the tensors. A method that is not listed here is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from penstock.backend.checkpoint.files.json_file import convert, read_json_object, shorten
from penstock.backend.checkpoint.files.layout import CONFIG_FILE
from penstock.backend.checkpoint.formats.matrix_format import MatrixFormat
from penstock.backend.checkpoint.formats.methods.auto_round import read_auto_round
from penstock.backend.checkpoint.formats.methods.awq import Awq, AwqGemv, AwqGemvFast
from penstock.backend.checkpoint.formats.methods.bitsandbytes import Bitsandbytes4Bit, BitsandbytesInt8
from penstock.backend.checkpoint.formats.methods.compressed_tensors import Groups, PackedIntegers, PlainInt8
from penstock.backend.checkpoint.formats.methods.gptq import Gptq
from penstock.backend.checkpoint.formats.methods.mlx import read_mlx
from penstock.backend.checkpoint.formats.methods.modelopt import read_modelopt
from penstock.backend.checkpoint.formats.methods.settings import (
    LM_HEAD,
    GroupSize,
    Names,
    all_but,
    inputs_per_group,
    one_of,
)
from penstock.backend.checkpoint.formats.module_names import is_excluded, is_target
from penstock.backend.checkpoint.formats.numbers.float4 import Mxfp4, Nvfp4
from penstock.backend.checkpoint.formats.numbers.float8 import Float8
from penstock.backend.checkpoint.formats.numbers.ggml import BLOCK_TYPES, GgmlMatrix
from penstock.backend.checkpoint.formats.numbers.integers import INTEGER_BITS
from penstock.backend.checkpoint.formats.quant_method import quantization_settings, with_own_file
from penstock.backend.checkpoint.formats.stored_formats import PLAIN, Rule, StoredFormats
from penstock.backend.errors import StartupError

_EXPERTS = ".experts."
_BlockSize = Annotated[int, Meta(ge=1, le=1 << 20)]


def read_stored_formats(model_dir: Path) -> StoredFormats:
    """Return the formats that config.json declares. Raises StartupError."""
    path = model_dir / CONFIG_FILE
    try:
        return parse_stored_formats(with_own_file(read_json_object(path), model_dir))
    except StartupError as error:
        raise StartupError(f"{path}: {error}") from None


def parse_stored_formats(config: Mapping[str, Any]) -> StoredFormats:
    """Like `read_stored_formats`, from the decoded config.json."""
    settings = quantization_settings(config)
    if settings is None:
        return PLAIN
    if not isinstance(settings, dict):
        raise StartupError(f"quantization_config is {shorten(settings)}; it must be an object")
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        raise StartupError(
            f"quantization_config.quant_method is {shorten(method)}; supported are {', '.join(_METHODS)}"
        )
    return _METHODS[method](settings)


class _GptqSettings(Struct, frozen=True):
    bits: int
    group_size: GroupSize = 128
    desc_act: bool = False
    lm_head: bool = False
    checkpoint_format: str | None = None
    format: str | None = None
    modules_in_block_to_quantize: Annotated[tuple[str | Names, ...], Meta(max_length=4096)] | None = None
    dynamic: dict[str, Any] | None = None
    modules_to_not_convert: Names | None = None


class _GptqChanges(Struct, frozen=True, forbid_unknown_fields=True):
    """Changes that a rule of `dynamic` makes for the linears that it matches; None is no change."""

    bits: int | None = None
    group_size: GroupSize | None = None
    desc_act: bool | None = None
    sym: bool | None = None
    """Zero points are read in either case."""


def _gptq(values: dict[str, Any]) -> StoredFormats:
    settings = convert(values, _GptqSettings, "quantization_config")
    layout = one_of("checkpoint_format", settings.checkpoint_format or settings.format or "gptq", ("gptq", "gptq_v2"))
    own = Gptq(
        one_of("bits", settings.bits, INTEGER_BITS),
        inputs_per_group(settings.group_size),
        settings.desc_act,
        1 if layout == "gptq" else 0,
    )
    only: tuple[str, ...] = ()
    for names in settings.modules_in_block_to_quantize or ():
        only += (names,) if isinstance(names, str) else names

    skipped = settings.modules_to_not_convert or ()

    def covers(exceptions: tuple[str, ...], module: str) -> bool:
        if module == LM_HEAD:
            return settings.lm_head
        is_skipped = is_excluded(module, skipped) or is_target(module, exceptions)
        return not is_skipped and (not only or is_excluded(module, only))

    exceptions: tuple[str, ...] = ()
    rules = []
    for name, changes in (settings.dynamic or {}).items():
        pattern = f"re:{name.removeprefix('-:').removeprefix('+:')}"
        if name.startswith("-:"):
            exceptions = (*exceptions, pattern)
        else:
            matched = partial(_is_target_and, pattern, partial(covers, exceptions))
            rules.append(Rule(_changed_gptq(own, f"dynamic.{shorten(name)}", changes), matched))
    return StoredFormats((*rules, Rule(own, partial(covers, exceptions))))


def _changed_gptq(own: Gptq, where: str, values: Any) -> Gptq:
    changes = convert(values, _GptqChanges, f"quantization_config.{where}")
    return replace(
        own,
        bits=own.bits if changes.bits is None else one_of(f"{where}.bits", changes.bits, INTEGER_BITS),
        group_size=own.group_size if changes.group_size is None else inputs_per_group(changes.group_size),
        act_order=own.act_order if changes.desc_act is None else changes.desc_act,
    )


def _is_target_and(pattern: str, covers: Callable[[str], bool], module: str) -> bool:
    return is_target(module, (pattern,)) and covers(module)


_AWQ_LAYOUTS: dict[str, Callable[[int | None], MatrixFormat]] = {"gemm": Awq, "gemv": AwqGemv, "gemv_fast": AwqGemvFast}


class _AwqSettings(Struct, frozen=True):
    bits: int = 4
    group_size: GroupSize = 128
    version: str | None = None
    format: str | None = None
    backend: str | None = None
    modules_to_not_convert: Names | None = None


def _awq(values: dict[str, Any]) -> StoredFormats:
    settings = convert(values, _AwqSettings, "quantization_config")
    one_of("bits", settings.bits, (4,))
    version = one_of("version", (settings.version or settings.format or "gemm").lower(), tuple(_AWQ_LAYOUTS))
    if settings.backend == "llm-awq":
        raise StartupError('quantization_config.backend is "llm-awq"; supported is the layout of AutoAWQ')
    matrix = _AWQ_LAYOUTS[version](inputs_per_group(settings.group_size))
    return StoredFormats((Rule(matrix, all_but(settings.modules_to_not_convert)),))


class _Fp8Settings(Struct, frozen=True):
    weight_block_size: Annotated[tuple[_BlockSize, ...], Meta(min_length=2, max_length=2)] | None = None
    fmt: str = "e4m3"
    modules_to_not_convert: Names | None = None
    ignored_layers: Names | None = None
    activation_scheme: str | None = None


def _fp8(values: dict[str, Any]) -> StoredFormats:
    settings = convert(values, _Fp8Settings, "quantization_config")
    one_of("fmt", settings.fmt, ("e4m3", "float8_e4m3fn"))
    if settings.weight_block_size is None:
        matrix = Float8("fp8", None, ("weight_scale_inv", "weight_scale"))
    else:
        outputs, inputs = settings.weight_block_size
        matrix = Float8("fp8", (outputs, inputs), ("weight_scale_inv",))
    rule = Rule(matrix, all_but(settings.modules_to_not_convert or settings.ignored_layers))
    return StoredFormats((rule,), rounds_rows=settings.activation_scheme in ("dynamic", "static"))


class _WeightSettings(Struct, frozen=True):
    num_bits: int
    type: str = "int"
    strategy: Literal["tensor", "channel", "group", "block", "tensor_group"] | None = None
    symmetric: bool = True
    group_size: GroupSize | None = None
    block_structure: Annotated[tuple[_BlockSize, ...], Meta(min_length=2, max_length=2)] | None = None
    actorder: str | bool | None = None


class _GroupSettings(Struct, frozen=True):
    targets: Names
    weights: _WeightSettings | None = None
    input_activations: dict[str, Any] | None = None
    format: str | None = None

    @property
    def rounds_rows(self) -> bool:
        """Whether activations have 8 bits (`StoredFormats.rounds_rows`)."""
        if self.weights is None or self.input_activations is None:
            return False
        kinds = self.input_activations.get("num_bits"), self.input_activations.get("type", "int")
        return kinds == (8, self.weights.type)


class _CompressedSettings(Struct, frozen=True):
    config_groups: Annotated[dict[str, _GroupSettings], Meta(max_length=4096)]
    format: str = "dense"
    ignore: Names | None = None
    sparsity_config: dict[str, Any] | None = None


def _compressed_tensors(values: dict[str, Any]) -> StoredFormats:
    settings = convert(values, _CompressedSettings, "quantization_config")
    sparsity = (settings.sparsity_config or {}).get("format", "dense")
    if sparsity != "dense":
        raise StartupError(f"quantization_config.sparsity_config.format is {shorten(sparsity)}; it must be dense")
    rules, rounds_rows = [], True
    for name, group in settings.config_groups.items():
        if group.weights is None:
            continue  # it quantises only activations or the KV cache, which we compute as usual
        rounds_rows = rounds_rows and group.rounds_rows
        where = f"config_groups.{name}"
        matrix = _compressed_matrix(where, group.weights, group.format or settings.format)
        rules.append(Rule(matrix, partial(_is_target_but, group.targets, settings.ignore or ())))
    return StoredFormats(tuple(rules), rounds_rows=rounds_rows and bool(rules))


def _is_target_but(targets: tuple[str, ...], ignored: tuple[str, ...], module: str) -> bool:
    return is_target(module, targets) and not is_target(module, ignored)


_COMPRESSED_LAYOUTS = (
    "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mxfp4-pack-quantized",
    "nvfp4-pack-quantized",
)  # fmt: skip


_FLOAT4_LAYOUTS: dict[str, tuple[int, MatrixFormat]] = {
    "mxfp4-pack-quantized": (32, Mxfp4("compressed-tensors", "weight_packed", "weight_scale", "bytes")),
    "nvfp4-pack-quantized": (16, Nvfp4("compressed-tensors", "weight_packed", "weight_global_scale")),
}
"""Each format with its group_size."""


def _compressed_matrix(where: str, weights: _WeightSettings, layout: str) -> MatrixFormat:
    strategy = weights.strategy or ("tensor" if weights.group_size is None else "group")
    if strategy == "group":
        if weights.group_size is None:
            raise StartupError(f"quantization_config.{where}.weights.group_size is missing for strategy group")
        strategy = "channel" if inputs_per_group(weights.group_size) is None else strategy
    layout = one_of(f"{where}.format", layout, _COMPRESSED_LAYOUTS)
    kind = one_of(f"{where}.weights.type", weights.type, ("int", "float"))
    if layout in _FLOAT4_LAYOUTS:
        group_size, matrix = _FLOAT4_LAYOUTS[layout]
        one_of(f"{where}.weights.group_size", weights.group_size, (group_size,))
        one_of(f"{where}.weights.symmetric", weights.symmetric, (True,))
        return matrix
    if kind == "float":
        one_of(f"{where}.weights.num_bits", weights.num_bits, (8,))
        one_of(f"{where}.weights.strategy", strategy, ("tensor", "channel", "block"))
        if strategy == "block" and weights.block_structure is None:
            raise StartupError(f"quantization_config.{where}.weights.block_structure is missing for strategy block")
        block = None if weights.block_structure is None else (weights.block_structure[0], weights.block_structure[1])
        return Float8("compressed-tensors", block, ("weight_scale",), per_output=strategy == "channel")
    one_of(f"{where}.weights.strategy", strategy, ("tensor", "channel", "group"))
    groups = Groups(strategy, weights.group_size if strategy == "group" else None)
    if layout == "pack-quantized":
        bits = one_of(f"{where}.weights.num_bits", weights.num_bits, INTEGER_BITS)
        return PackedIntegers(bits, groups, weights.symmetric, weights.actorder in ("group", "dynamic", True))
    one_of(f"{where}.weights.num_bits", weights.num_bits, (8,))
    return PlainInt8(groups, weights.symmetric)


class _Mxfp4Settings(Struct, frozen=True):
    modules_to_not_convert: Names | None = None


def _mxfp4(values: dict[str, Any]) -> StoredFormats:
    """MXFP4 as gpt-oss is published: only experts."""
    skipped = convert(values, _Mxfp4Settings, "quantization_config").modules_to_not_convert or ()

    def covers(module: str) -> bool:
        return _EXPERTS in module and not is_excluded(module, skipped)

    return StoredFormats((Rule(Mxfp4("mxfp4", "blocks", "scales", "blocks"), covers),))


class _BitsandbytesSettings(Struct, frozen=True):
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_quant_storage: str = "uint8"
    llm_int8_skip_modules: Names | None = None


def _bitsandbytes(values: dict[str, Any]) -> StoredFormats:
    settings = convert(values, _BitsandbytesSettings, "quantization_config")
    covers = all_but(settings.llm_int8_skip_modules)
    if settings.load_in_8bit and not settings.load_in_4bit:
        return StoredFormats((Rule(BitsandbytesInt8(), covers),))
    one_of("load_in_4bit", settings.load_in_4bit, (True,))
    one_of("bnb_4bit_quant_storage", settings.bnb_4bit_quant_storage, ("uint8",))
    kind = one_of("bnb_4bit_quant_type", settings.bnb_4bit_quant_type, ("nf4", "fp4"))
    matrix = Bitsandbytes4Bit(kind, settings.bnb_4bit_use_double_quant)
    return StoredFormats((Rule(matrix, covers),))


class _GgufSettings(Struct, frozen=True):
    types: Annotated[dict[str, Names], Meta(max_length=64)]


def _gguf(values: dict[str, Any]) -> StoredFormats:
    """Formats that `checkpoint.gguf.directory` declared."""
    types = convert(values, _GgufSettings, "quantization_config").types
    rules = [
        Rule(GgmlMatrix(one_of("types", name, tuple(BLOCK_TYPES))), frozenset(modules).__contains__)
        for name, modules in types.items()
    ]
    return StoredFormats(tuple(rules), cover_embedding=True)


_METHODS: dict[str, Callable[[dict[str, Any]], StoredFormats]] = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "gguf": _gguf,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "auto-round": read_auto_round,
    "auto_round": read_auto_round,
    "intel/auto-round": read_auto_round,
    "mlx": read_mlx,
}
