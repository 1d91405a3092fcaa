"""AWQ in three layouts of AutoAWQ and GPTQModel. Each number has four bits.

"gemm" packs along the outputs and keeps outputs last, "gemv" packs along the inputs and keeps outputs first, and
"gemv_fast" interleaves four outputs in words of 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.backend.checkpoint.formats.matrix_format import (
    FLOATS,
    MatrixFormat,
    Part,
    Parts,
    Shape,
    UnreadableMatrixError,
    check_multiple,
)
from penstock.backend.checkpoint.formats.numbers.integers import (
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

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""In a word of "gemm": the index of the four bits, from the lowest, that hold each of its 8 outputs."""
_BLOCK_OUTPUTS, _BLOCK_INPUTS = 4, 64
"""The numbers that "gemv_fast" interleaves."""


@dataclass(frozen=True)
class Awq(MatrixFormat):
    """w[output, input] = scale[group] × (value - zero[group]), 4 bits."""

    group_size: int | None
    """None: all inputs are one group."""

    @property
    def description(self) -> str:
        return describe("AWQ", 4, self.group_size)

    def parts(self, shape: Shape) -> dict[str, Part]:
        outputs, inputs = shape
        groups = count_groups(inputs, self.group_size)
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
            values = unpack(packed[:, words], 4).view(len(packed), -1, 8)[:, :, _ORDER]
            return values.reshape(len(packed), -1)[:, taken].T.contiguous()

        return outputs_first(parts["qweight"]), parts["scales"][:, rows].T, outputs_first(parts["qzeros"])


@dataclass(frozen=True)
class AwqGemv(MatrixFormat):
    """Like `Awq`, but each output's groups are padded to whole words; for small groups to two or four words."""

    group_size: int | None
    """None: all inputs are one group."""

    @property
    def description(self) -> str:
        return describe("AWQ gemv", 4, self.group_size)

    def parts(self, shape: Shape) -> dict[str, Part]:
        outputs, inputs = shape
        words = _zero_words(inputs, self.group_size)
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
        groups = count_groups(shape[1], self.group_size)
        return parts["scales"][rows, :groups], unpack(parts["qzeros"][rows], 4)[:, :groups]


@dataclass(frozen=True)
class AwqGemvFast(MatrixFormat):
    """w[output, input] = scale[group] × value + qzero[group], where qzero is -scale × zero, rounded to binary16.

    The rounding is undone here: zero points are integers again, as in the other layouts.
    """

    group_size: int | None
    """None: all inputs are one group."""

    @property
    def description(self) -> str:
        return describe("AWQ gemv_fast", 4, self.group_size)

    def parts(self, shape: Shape) -> dict[str, Part]:
        outputs, inputs = shape
        groups = 8 * _zero_words(inputs, self.group_size)
        check_multiple("outputs", outputs, _BLOCK_OUTPUTS, "the interleaved outputs")
        check_multiple("inputs", inputs, _BLOCK_INPUTS, "the inputs of a block")
        return {
            "qweight": Part(((outputs // _BLOCK_OUTPUTS, inputs),), ("I16",)),
            "qzeros": Part(((groups, outputs),), ("F16",)),
            "scales": Part(((groups, outputs),), ("F16",)),
        }

    def check(self, parts: Parts, shape: Shape) -> None:
        groups = count_groups(shape[1], self.group_size)
        scales, qzeros = parts["scales"][:groups], parts["qzeros"][:groups]
        zeros = _integer_zeros(scales, qzeros)
        is_wrong = (zeros < 0) | (zeros > 15) | ((scales.float() * -zeros).half() != qzeros)
        if bool(is_wrong.any()):
            group, output = is_wrong.nonzero()[0].tolist()
            raise UnreadableMatrixError(
                f"qzeros[{group}, {output}] is {qzeros[group, output]:.5g}; it must be the scale, "
                f"{scales[group, output]:.5g}, times an integer from -15 to 0"
            )

    def expand(self, parts: Parts, shape: Shape, rows: slice) -> Tensor:
        return scale_groups(*self._rows(parts, shape, rows))

    def packed_form(self, shape: Shape) -> PackedForm | None:
        return int4_form(shape[1], self.group_size or shape[1])

    def pack(self, parts: Parts, shape: Shape) -> QuantizedWeight | None:
        values, scales, zeros = self._rows(parts, shape, slice(0, shape[0]))
        return pack_int4(values[:, ::2] | (values[:, 1::2] << 4), scales, zeros)

    def _rows(self, parts: Parts, shape: Shape, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Values [rows, inputs], scales and zeros [rows, groups] of some outputs."""
        groups = count_groups(shape[1], self.group_size)
        scales, qzeros = (parts[name][:groups, rows].T for name in ("scales", "qzeros"))
        blocks = slice(rows.start // _BLOCK_OUTPUTS, -(-rows.stop // _BLOCK_OUTPUTS))
        first = rows.start - blocks.start * _BLOCK_OUTPUTS
        values = _deinterleave(unpack(parts["qweight"][blocks], 4))
        return values[first : first + rows.stop - rows.start], scales, _integer_zeros(scales, qzeros)


def _deinterleave(values: Tensor) -> Tensor:
    """[4 × n, inputs] from [n, 4 × inputs]: blocks of 64 inputs of four outputs, one output after the other.

    Of 32 inputs 8 × a + 2 × b + c, where a and b are below 4, stands at 8 × b + 4 × c + a.
    """
    blocks = values.view(len(values), -1, _BLOCK_OUTPUTS, _BLOCK_INPUTS // 32, 4, 2, 4)
    return blocks.permute(0, 2, 1, 3, 6, 4, 5).reshape(_BLOCK_OUTPUTS * len(values), -1)


def _integer_zeros(scales: Tensor, qzeros: Tensor) -> Tensor:
    """float32; 0 where the scale is 0."""
    zeros = (qzeros.float() / -scales.float()).round()
    return torch.where(scales == 0, 0, zeros)


def _zero_words(inputs: int, group_size: int | None) -> int:
    """Words of 8 groups, padded."""
    words = -(-count_groups(inputs, group_size) // 8)
    multiple = {32: 4, 64: 2}.get(group_size or inputs, 1)
    return -(-words // multiple) * multiple
