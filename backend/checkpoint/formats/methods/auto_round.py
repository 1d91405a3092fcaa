"""AutoRound: integers in the layout of GPTQ or of AWQ, with settings by linear."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from msgspec import Meta, Struct

from penstock.backend.checkpoint.files.json_file import convert, shorten
from penstock.backend.checkpoint.formats.matrix_format import MatrixFormat
from penstock.backend.checkpoint.formats.methods.awq import Awq
from penstock.backend.checkpoint.formats.methods.gptq import Gptq
from penstock.backend.checkpoint.formats.methods.settings import LM_HEAD, GroupSize, Names, inputs_per_group, one_of
from penstock.backend.checkpoint.formats.module_names import is_target
from penstock.backend.checkpoint.formats.numbers.integers import INTEGER_BITS
from penstock.backend.checkpoint.formats.stored_formats import Rule, StoredFormats

_PLAIN_BITS = 16
_LAYOUTS = ("auto_round:auto_gptq", "auto_round:gptq", "auto_gptq", "auto_round:auto_awq", "auto_round:awq", "auto_awq")
_PATTERN_CHARACTERS = frozenset("*+?^$()[]{}|\\")
"""A name of extra_config with one of these is an expression for a part of a linear's name."""


class _Changes(Struct, frozen=True):
    bits: int | None = None
    group_size: GroupSize | None = None
    data_type: str = "int"


class _Settings(Struct, frozen=True):
    bits: int
    group_size: GroupSize = 128
    data_type: str = "int"
    packing_format: str | None = None
    backend: str | None = None
    """An older name of packing_format."""
    block_name_to_quantize: str | Names | None = None
    extra_config: Annotated[dict[str, _Changes], Meta(max_length=1 << 16)] | None = None


def read_auto_round(values: dict[str, Any]) -> StoredFormats:
    """Raises StartupError."""
    settings = convert(values, _Settings, "quantization_config")
    layout = one_of("packing_format", settings.packing_format or settings.backend or _LAYOUTS[0], _LAYOUTS)
    one_of("data_type", settings.data_type, ("int",))
    extra = settings.extra_config or {}
    blocks = settings.block_name_to_quantize or ()
    blocks = tuple(blocks.split(",")) if isinstance(blocks, str) else blocks
    plain = tuple(map(_target, (name for name, changes in extra.items() if (changes.bits or 0) >= _PLAIN_BITS)))

    def covers(module: str) -> bool:
        if is_target(module, plain):
            return False
        return is_target(module, (f"re:{name}" for name in blocks)) if blocks else module != LM_HEAD

    rules = []
    for name, changes in extra.items():
        if (changes.bits or 0) < _PLAIN_BITS:
            where = f"extra_config.{shorten(name)}"
            one_of(f"{where}.data_type", changes.data_type, ("int",))
            size = settings.group_size if changes.group_size is None else changes.group_size
            matrix = _matrix(where + ".", layout, changes.bits or settings.bits, size)
            rules.append(Rule(matrix, partial(_is_one_of, (_target(name),))))
    return StoredFormats((*rules, Rule(_matrix("", layout, settings.bits, settings.group_size), covers)))


def _matrix(where: str, layout: str, bits: int, group_size: int) -> MatrixFormat:
    if layout.endswith("awq"):
        one_of(f"{where}bits", bits, (4,))
        return Awq(inputs_per_group(group_size))
    # AutoGPTQ's layout stores zero points less 1.
    return Gptq(one_of(f"{where}bits", bits, INTEGER_BITS), inputs_per_group(group_size), False, 1)


def _is_one_of(targets: tuple[str, ...], module: str) -> bool:
    return is_target(module, targets)


def _target(name: str) -> str:
    return name if _PATTERN_CHARACTERS.isdisjoint(name) else f"re:.*(?:{name})"
