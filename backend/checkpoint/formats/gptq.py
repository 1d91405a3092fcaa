"""GPTQ as AutoGPTQ and GPTQModel write it, with act-order, and AWQ as AutoAWQ writes it ("gemm" and "gemv").

All pack integers into words of 32 bits. GPTQ packs along the inputs and AWQ's "gemm" along the outputs; both keep
outputs last. AWQ's "gemv" packs along the inputs and keeps outputs first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.backend.checkpoint.formats.integers import (
    WORD_BITS,
    as_bytes,
    int4_form,
    pack_int4,
    scale_groups,
    unpack,
)
from penstock.backend.checkpoint.formats.matrix_format import (
    FLOATS,
    MatrixFormat,
    Part,
    Parts,
    Shape,
    check_multiple,
    check_range,
)
from penstock.backend.checkpoint.quantized_weights import PackedForm, QuantizedWeight

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of a word, from the lowest, hold each of its 8 outputs."""


@dataclass(frozen=True)
class Gptq(MatrixFormat):
    """w[output, input] = scale[group] × (value - zero[group]), where g_idx is the group of each input."""

    bits: int
    group_size: int | None
    """None: all inputs are one group."""
    act_order: bool
    zero_offset: int
    """Added to stored zero points: 1 in AutoGPTQ's format, 0 in "gptq_v2"."""

    @property
    def description(self) -> str:
        return _describe("GPTQ", self.bits, self.group_size) + (", act-order" if self.act_order else "")

    @property
    def _per_word(self) -> int:
        return WORD_BITS // self.bits

    def parts(self, shape: Shape) -> dict[str, Part]:
        outputs, inputs = shape
        groups = _num_groups(inputs, self.group_size)
        check_multiple("inputs", inputs, self._per_word, "the numbers in a word of 32 bits")
        check_multiple("outputs", outputs, self._per_word, "the numbers in a word of 32 bits")
        return {
            "qweight": Part(((inputs // self._per_word, outputs),), ("I32",)),
            "qzeros": Part(((groups, outputs // self._per_word),), ("I32",)),
            "scales": Part(((groups, outputs),), FLOATS),
            "g_idx": Part(((inputs,),), ("I32",), optional=not self.act_order),
        }

    def check(self, parts: Parts, shape: Shape) -> None:
        groups = _num_groups(shape[1], self.group_size)
        if "g_idx" in parts:
            check_range("g_idx", parts["g_idx"], groups)

    def expand(self, parts: Parts, shape: Shape, rows: slice) -> Tensor:  # noqa: ARG002 - the parts have it
        values = unpack(parts["qweight"][:, rows].T, self.bits)
        scales, zeros = self._scales_and_zeros(parts, rows)
        return scale_groups(values, scales, zeros, None if self._is_in_order(parts) else parts["g_idx"])

    def packed_form(self, shape: Shape) -> PackedForm | None:
        if self.bits != 4 or (self.act_order and self.group_size is not None):
            return None
        return int4_form(shape[1], self.group_size or shape[1])

    def pack(self, parts: Parts, shape: Shape) -> QuantizedWeight | None:
        if self.bits != 4 or not self._is_in_order(parts):
            return None
        return pack_int4(as_bytes(parts["qweight"].T), *self._scales_and_zeros(parts, slice(0, shape[0])))

    def _scales_and_zeros(self, parts: Parts, rows: slice) -> tuple[Tensor, Tensor]:
        """Both [rows, groups] of some outputs."""
        words = slice(rows.start // self._per_word, -(-rows.stop // self._per_word))
        first = rows.start - words.start * self._per_word
        zeros = unpack(parts["qzeros"][:, words], self.bits)[:, first : first + rows.stop - rows.start]
        return parts["scales"][:, rows].T, zeros.T.short() + self.zero_offset

    @staticmethod
    def _is_in_order(parts: Parts) -> bool:
        """Whether each group is of consecutive inputs, as without act-order."""
        if "g_idx" not in parts:
            return True
        inputs, groups = len(parts["g_idx"]), len(parts["scales"])
        return torch.equal(parts["g_idx"], torch.arange(inputs, dtype=torch.int32) // (inputs // groups))


@dataclass(frozen=True)
class Awq(MatrixFormat):
    """w[output, input] = scale[group] × (value - zero[group]), 4 bits."""

    group_size: int | None
    """None: all inputs are one group."""

    @property
    def description(self) -> str:
        return _describe("AWQ", 4, self.group_size)

    def parts(self, shape: Shape) -> dict[str, Part]:
        outputs, inputs = shape
        groups = _num_groups(inputs, self.group_size)
        check_multiple("outputs", outputs, 8, "the numbers in a word of 32 bits")
        return {
            "qweight": Part(((inputs, outputs // 8),), ("I32",)),
            "qzeros": Part(((groups, outputs // 8),), ("I32",)),
            "scales": Part(((groups, outputs),), FLOATS),
        }

    def expand(self, parts: Parts, shape: Shape, rows: slice) -> Tensor:  # noqa: ARG002 - the parts have it
        return scale_groups(*self._rows(parts, rows))

    def packed_form(self, shape: Shape) -> PackedForm | None:
        return int4_form(shape[1], self.group_size or shape[1])

    def pack(self, parts: Parts, shape: Shape) -> QuantizedWeight | None:
        values, scales, zeros = self._rows(parts, slice(0, shape[0]))
        return pack_int4(values[:, ::2] | (values[:, 1::2] << 4), scales, zeros)

    def _rows(self, parts: Parts, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Values [rows, inputs], scales and zeros [rows, groups] of some outputs."""
        words = slice(rows.start // 8, -(-rows.stop // 8))
        first = rows.start - words.start * 8
        taken = slice(first, first + rows.stop - rows.start)

        def outputs_first(packed: Tensor) -> Tensor:
            values = unpack(packed[:, words], 4).view(len(packed), -1, 8)[:, :, _AWQ_ORDER]
            return values.reshape(len(packed), -1)[:, taken].T.contiguous()

        return outputs_first(parts["qweight"]), parts["scales"][:, rows].T, outputs_first(parts["qzeros"])


@dataclass(frozen=True)
class AwqGemv(MatrixFormat):
    """As `Awq`, with the groups of each output padded to whole words, or to two or four of them for small groups."""

    group_size: int | None
    """None: all inputs are one group."""

    @property
    def description(self) -> str:
        return _describe("AWQ gemv", 4, self.group_size)

    def parts(self, shape: Shape) -> dict[str, Part]:
        outputs, inputs = shape
        words = self._zero_words(inputs)
        check_multiple("inputs", inputs, 8, "the numbers in a word of 32 bits")
        return {
            "qweight": Part(((outputs, inputs // 8),), ("I32",)),
            "qzeros": Part(((outputs, words),), ("I32",)),
            "scales": Part(((outputs, words * 8),), FLOATS),
        }

    def expand(self, parts: Parts, shape: Shape, rows: slice) -> Tensor:
        return scale_groups(unpack(parts["qweight"][rows], 4), *self._scales_and_zeros(parts, shape, rows))

    def packed_form(self, shape: Shape) -> PackedForm | None:
        return int4_form(shape[1], self.group_size or shape[1])

    def pack(self, parts: Parts, shape: Shape) -> QuantizedWeight | None:
        return pack_int4(as_bytes(parts["qweight"]), *self._scales_and_zeros(parts, shape, slice(0, shape[0])))

    def _scales_and_zeros(self, parts: Parts, shape: Shape, rows: slice) -> tuple[Tensor, Tensor]:
        """Both [rows, groups] of some outputs."""
        groups = _num_groups(shape[1], self.group_size)
        return parts["scales"][rows, :groups], unpack(parts["qzeros"][rows], 4)[:, :groups]

    def _zero_words(self, inputs: int) -> int:
        words = -(-_num_groups(inputs, self.group_size) // 8)
        multiple = {32: 4, 64: 2}.get(self.group_size or inputs, 1)
        return -(-words // multiple) * multiple


def _num_groups(inputs: int, group_size: int | None) -> int:
    if group_size is None:
        return 1
    check_multiple("inputs", inputs, group_size, "group_size")
    return inputs // group_size


def _describe(method: str, bits: int, group_size: int | None) -> str:
    return f"{method}, {bits} bits, " + ("one group" if group_size is None else f"groups of {group_size}")
