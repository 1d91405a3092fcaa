"""The integer formats of compressed-tensors (llm-compressor): plain int8, and 4 or 8 bits packed into words."""

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
    check_range,
)
from penstock.backend.checkpoint.formats.numbers.integers import (
    WORD_BITS,
    as_bytes,
    int4_form,
    pack_int4,
    scale_groups,
    unpack,
)
from penstock.backend.checkpoint.weight_forms.quantized_forms import PackedForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import MAX_QUANTIZED_INPUTS, Int8Weight, QuantizedWeight
from penstock.backend.lazy_torch import Tensor, torch


@dataclass(frozen=True)
class Groups:
    """The numbers that share a scale."""

    strategy: str
    """"tensor", "channel" (an output) or "group" (of inputs of an output)."""
    size: int | None
    """Inputs of a group."""

    def shape(self, shape: Shape) -> Shape:
        """The shape of scales and zero points."""
        outputs, inputs = shape
        if self.strategy == "tensor":
            return 1, 1
        if self.size is None:
            return outputs, 1
        check_multiple("inputs", inputs, self.size, "group_size")
        return outputs, inputs // self.size

    def scale_part(self, shape: Shape, dtypes: tuple[str, ...], *, optional: bool = False) -> Part:
        """[outputs, groups]; with one group also [outputs], and for the whole tensor [1] or []."""
        rows, groups = self.shape(shape)
        shapes: list[tuple[int, ...]] = [(rows, groups)]
        if groups == 1:
            shapes.append((rows,))
        if self.strategy == "tensor":
            shapes.append(())
        return Part(tuple(shapes), dtypes, optional)

    def rows(self, scales: Tensor, shape: Shape, rows: slice) -> Tensor:
        """[rows, groups]"""
        groups = self.shape(shape)[1]
        scales = scales.view(-1, groups)
        return scales.expand(rows.stop - rows.start, 1) if len(scales) == 1 else scales[rows]

    def __str__(self) -> str:
        if self.size is not None:
            return f"groups of {self.size}"
        return "one scale per " + ("matrix" if self.strategy == "tensor" else "output")


@dataclass(frozen=True)
class PlainInt8(MatrixFormat):
    """w = scale × (value - zero): "int-quantized". Scales of activations are not read."""

    groups: Groups
    symmetric: bool

    @property
    def description(self) -> str:
        return f"compressed-tensors, int8, {self.groups}"

    def parts(self, shape: Shape) -> dict[str, Part]:
        parts = {"weight": Part((shape,), ("I8",)), "weight_scale": self.groups.scale_part(shape, FLOATS)}
        if not self.symmetric:
            parts["weight_zero_point"] = self.groups.scale_part(shape, ("I8",))
        return parts

    def expand(self, parts: Parts, shape: Shape, rows: slice) -> Tensor:
        scales = self.groups.rows(parts["weight_scale"], shape, rows)
        zeros = torch.zeros_like(scales)
        if not self.symmetric:
            zeros = self.groups.rows(parts["weight_zero_point"], shape, rows)
        return scale_groups(parts["weight"][rows], scales, zeros)

    def packed_form(self, shape: Shape) -> PackedForm | None:
        return _int8_form(shape) if self.symmetric and self.groups.size is None else None

    def pack(self, parts: Parts, shape: Shape) -> QuantizedWeight | None:
        if self.packed_form(shape) is None:
            return None
        return _pack_int8(parts["weight"], self.groups.rows(parts["weight_scale"], shape, slice(0, shape[0])))


@dataclass(frozen=True)
class PackedIntegers(MatrixFormat):
    """w = scale × (value - zero), values in words along the inputs, zeros along the outputs: "pack-quantized"."""

    bits: int
    groups: Groups
    symmetric: bool
    act_order: bool
    """Groups consist of the inputs that weight_g_idx lists, not of consecutive ones."""

    @property
    def description(self) -> str:
        return f"compressed-tensors, int{self.bits}, {self.groups}" + (", act-order" if self.act_order else "")

    def parts(self, shape: Shape) -> dict[str, Part]:
        outputs, inputs = shape
        per_word = WORD_BITS // self.bits
        parts = {
            "weight_packed": Part(((outputs, -(-inputs // per_word)),), ("I32",)),
            "weight_scale": self.groups.scale_part(shape, FLOATS),
            "weight_shape": Part(((2,),), ("I64", "I32"), optional=True),
        }
        if not self.symmetric:
            rows, groups = self.groups.shape(shape)
            parts["weight_zero_point"] = Part(((-(-rows // per_word), groups),), ("I32",))
        if self.act_order:
            parts["weight_g_idx"] = Part(((inputs,),), ("I32",))
        return parts

    def check(self, parts: Parts, shape: Shape) -> None:
        if "weight_shape" in parts and (stored := tuple(parts["weight_shape"].tolist())) != shape:
            raise UnreadableMatrixError(f"weight_shape is {list(stored)}; config.json makes it {list(shape)}")
        if "weight_g_idx" in parts:
            check_range("weight_g_idx", parts["weight_g_idx"], self.groups.shape(shape)[1])

    def expand(self, parts: Parts, shape: Shape, rows: slice) -> Tensor:
        values = unpack(parts["weight_packed"][rows], self.bits)[:, : shape[1]].contiguous()
        scales, zeros = self._scales_and_zeros(parts, shape, rows)
        return scale_groups(values, scales, zeros, parts.get("weight_g_idx"))

    def packed_form(self, shape: Shape) -> PackedForm | None:
        if self.act_order:
            return None
        if self.bits == 4:
            return int4_form(shape[1], self.groups.size or shape[1])
        return _int8_form(shape) if self.symmetric and self.groups.size is None else None

    def pack(self, parts: Parts, shape: Shape) -> QuantizedWeight | None:
        if self.packed_form(shape) is None:
            return None
        scales, zeros = self._scales_and_zeros(parts, shape, slice(0, shape[0]))
        if self.bits == 4:
            return pack_int4(as_bytes(parts["weight_packed"])[:, : shape[1] // 2], scales, zeros)
        values = as_bytes(parts["weight_packed"])[:, : shape[1]].contiguous()
        return _pack_int8(values.bitwise_xor_(128).view(torch.int8), scales)  # value - 128

    def _scales_and_zeros(self, parts: Parts, shape: Shape, rows: slice) -> tuple[Tensor, Tensor]:
        """Both [rows, groups] of some outputs."""
        scales = self.groups.rows(parts["weight_scale"], shape, rows)
        if self.symmetric:
            return scales, torch.full_like(scales, 1 << (self.bits - 1))
        zeros = unpack(parts["weight_zero_point"].T, self.bits).T[: self.groups.shape(shape)[0]]
        return scales, self.groups.rows(zeros.contiguous(), shape, rows)


def _int8_form(shape: Shape) -> PackedForm | None:
    return PackedForm(None) if shape[1] <= MAX_QUANTIZED_INPUTS else None


def _pack_int8(values: Tensor, scales: Tensor) -> Int8Weight:
    """int8 [outputs, inputs] and scales [outputs, 1]."""
    return Int8Weight(values, scales[:, 0].float().contiguous())
