"""GPTQ with act-order, as in AutoGPTQ and GPTQModel: integers packed along the inputs, outputs last."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.backend.checkpoint.formats.matrix_format import (
    FLOATS,
    MatrixFormat,
    Part,
    Parts,
    Shape,
    check_multiple,
    check_range,
)
from penstock.backend.checkpoint.formats.numbers.integers import (
    WORD_BITS,
    as_bytes,
    count_groups,
    describe,
    int4_form,
    pack_int4,
    scale_groups,
    unpack,
)
from penstock.backend.checkpoint.weight_forms.quantized_forms import PackedForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
from penstock.backend.lazy_torch import Tensor, torch


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
        return describe("GPTQ", self.bits, self.group_size) + (", act-order" if self.act_order else "")

    @property
    def _per_word(self) -> int:
        return WORD_BITS // self.bits

    def parts(self, shape: Shape) -> dict[str, Part]:
        outputs, inputs = shape
        groups = count_groups(inputs, self.group_size)
        check_multiple("inputs", inputs, self._per_word, "the numbers in a word of 32 bits")
        check_multiple("outputs", outputs, self._per_word, "the numbers in a word of 32 bits")
        return {
            "qweight": Part(((inputs // self._per_word, outputs),), ("I32",)),
            "qzeros": Part(((groups, outputs // self._per_word),), ("I32",)),
            "scales": Part(((groups, outputs),), FLOATS),
            "g_idx": Part(((inputs,),), ("I32",), optional=not self.act_order),
        }

    def check(self, parts: Parts, shape: Shape) -> None:
        groups = count_groups(shape[1], self.group_size)
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
        """Whether each group has consecutive inputs, as without act-order."""
        if "g_idx" not in parts:
            return True
        inputs, groups = len(parts["g_idx"]), len(parts["scales"])
        return torch.equal(parts["g_idx"], torch.arange(inputs, dtype=torch.int32) // (inputs // groups))
