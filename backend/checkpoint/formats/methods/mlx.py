"""MLX: groups of integers with a scale and a bias, or MXFP4, in words of 32 bits. Embeddings are quantised too."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

from msgspec import Struct

from penstock.backend.checkpoint.files.json_file import convert
from penstock.backend.checkpoint.formats.matrix_format import (
    FLOATS,
    MatrixFormat,
    Part,
    Parts,
    Shape,
    check_multiple,
)
from penstock.backend.checkpoint.formats.methods.settings import one_of
from penstock.backend.checkpoint.formats.module_names import spellings_of
from penstock.backend.checkpoint.formats.numbers.float4 import Mxfp4
from penstock.backend.checkpoint.formats.numbers.integers import WORD_BITS, as_bytes, count_groups, describe
from penstock.backend.checkpoint.formats.stored_formats import Rule, StoredFormats
from penstock.backend.checkpoint.weight_forms.quantized_forms import GroupedForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import MAX_QUANTIZED_INPUTS, GroupedWeight
from penstock.backend.lazy_torch import Tensor, torch

_FORM_BITS = {2: 4, 3: 4, 4: 4, 5: 5, 6: 8, 8: 8}
"""Bits of a value → those of the smallest form with kernels that holds it."""
_GROUP_SIZES = (32, 64, 128)
_FORM_GROUP = 32
_EXPERT = re.compile(r"(.+\.)experts\.\d+\.(\w+)")
_OF_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_NUM_FACTORS = 2


@dataclass(frozen=True)
class MlxAffine(MatrixFormat):
    """w = scale × value + bias: values of any number of bits follow each other, the lowest bits first."""

    bits: int
    group_size: int

    @property
    def description(self) -> str:
        return describe("MLX", self.bits, self.group_size)

    def parts(self, shape: Shape) -> dict[str, Part]:
        outputs, inputs = shape
        groups = (outputs, count_groups(inputs, self.group_size))
        check_multiple("inputs", inputs, WORD_BITS, "the bits of a word")
        return {
            "weight": Part(((outputs, inputs * self.bits // WORD_BITS),), ("U32",)),
            "scales": Part((groups,), FLOATS),
            "biases": Part((groups,), FLOATS),
        }

    def expand(self, parts: Parts, shape: Shape, rows: slice) -> Tensor:
        scales, biases = (parts[name][rows, :, None].float() for name in ("scales", "biases"))
        values = self._values(parts["weight"][rows]).float().view(*scales.shape[:2], -1)
        return values.mul_(scales).add_(biases).view(-1, shape[1])

    def packed_form(self, shape: Shape) -> GroupedForm | None:
        if shape[1] > MAX_QUANTIZED_INPUTS:
            return None
        return GroupedForm(_FORM_BITS[self.bits], _FORM_GROUP, _FORM_GROUP, has_minima=True)

    def pack(self, parts: Parts, shape: Shape) -> GroupedWeight | None:
        form, scales, minima = self.packed_form(shape), parts["scales"].double(), -parts["biases"].double()
        if form is None:
            return None
        if self.bits == 8:
            minima -= 128 * scales  # values are lowered by 128
        factors = torch.stack([scales, minima], dim=-1)
        if not torch.equal(factors.half().double(), factors):
            return None
        repeated = factors.float().repeat_interleave(self.group_size // _FORM_GROUP, dim=1)
        no_multipliers = torch.empty(shape[0], 0, _NUM_FACTORS, dtype=torch.int8)
        return GroupedWeight(form, self._form_values(parts["weight"]), repeated, no_multipliers)

    def _form_values(self, words: Tensor) -> Tensor:
        """As `GroupedWeight.values`."""
        if self.bits == 4:
            return as_bytes(words)
        values = self._values(words)
        if self.bits < 4:
            return values[:, ::2] | (values[:, 1::2] << 4)
        return (values ^ 128 if self.bits == 8 else values).view(torch.int8)

    def _values(self, words: Tensor) -> Tensor:
        """uint8 [n, inputs]"""
        content = as_bytes(words)
        if self.bits == 8:
            return content
        # Eight values fill as many bytes as a value has bits.
        octets = content.view(len(words), -1, self.bits).long()
        together = (octets << torch.arange(0, 8 * self.bits, 8)).sum(dim=-1, keepdim=True)
        values = (together >> torch.arange(0, 8 * self.bits, self.bits)) & ((1 << self.bits) - 1)
        return values.to(torch.uint8).view(len(words), -1)


class _Settings(Struct, frozen=True):
    bits: int
    group_size: int
    mode: str = "affine"


def read_mlx(values: dict[str, Any]) -> StoredFormats:
    """The key quantization of config.json: settings of all linears, and of single ones by name; false means plain.

    Raises StartupError.
    """
    own = {key: value for key, value in values.items() if not isinstance(value, dict | bool)}
    named: dict[MatrixFormat, set[str]] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            named.setdefault(_matrix(own | value), set()).add(name)
    plain = {name for name, value in values.items() if value is False}
    rules = [Rule(matrix, partial(_is_named, names)) for matrix, names in named.items()]
    rules.append(Rule(_matrix(own), lambda module: not _is_named(plain, module)))
    return StoredFormats(tuple(rules), cover_embedding=True, marker="scales")


def _matrix(values: dict[str, Any]) -> MatrixFormat:
    settings = convert(values, _Settings, "quantization")
    if one_of("mode", settings.mode, ("affine", "mxfp4")) == "mxfp4":
        one_of("group_size", settings.group_size, (32,))
        return Mxfp4("MLX", "weight", "scales", "words")
    bits = one_of("bits", settings.bits, tuple(_FORM_BITS))
    return MlxAffine(bits, one_of("group_size", settings.group_size, _GROUP_SIZES))


def _is_named(names: set[str], module: str) -> bool:
    """An expert is named together with the others of its layer, as it is stored."""
    match = _EXPERT.fullmatch(module)
    if match is not None:
        linear = _OF_MIXTRAL.get(match[2], match[2])
        return any(_is_named(names, f"{match[1]}{stack}.{linear}") for stack in ("switch_mlp", "experts"))
    return not names.isdisjoint(spellings_of(module))
