"""4-bit floats (E2M1) in blocks: MXFP4, whose scales are powers of two, and NVFP4, whose scales are 8-bit floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.backend.checkpoint.formats.matrix_format import (
    MatrixFormat,
    Part,
    Parts,
    Shape,
    UnreadableMatrixError,
    check_multiple,
)
from penstock.backend.checkpoint.formats.numbers.integers import as_bytes
from penstock.backend.checkpoint.weight_forms.quantized_forms import PackedForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import (
    E2M1,
    MAX_QUANTIZED_INPUTS,
    MXFP4_EXPONENTS,
    MXFP4_GROUP_SIZE,
    Mxfp4Weight,
)
from penstock.backend.lazy_torch import Tensor, torch

_NV_BLOCK = 16
_E8M0_BIAS = 127
_E8M0_NAN = 255


@dataclass(frozen=True)
class Mxfp4(MatrixFormat):
    """w = value × 2^exponent: E2M1 values in blocks of 32 inputs. The low 4 bits of a byte come first."""

    method: str
    values: str
    """Name of the tensor of values; the next field names the tensor of exponents."""
    exponents: str
    layout: Literal["blocks", "bytes", "words"]
    """The shape of values: [outputs, blocks, 16], [outputs, bytes] or, in words of 32 bits, [outputs, words]."""

    @property
    def description(self) -> str:
        return f"{self.method}, MXFP4"

    def parts(self, shape: Shape) -> dict[str, Part]:
        outputs, inputs = shape
        check_multiple("inputs", inputs, MXFP4_GROUP_SIZE, "the numbers in a block")
        blocks = (outputs, inputs // MXFP4_GROUP_SIZE)
        values, dtype = {
            "blocks": ((*blocks, MXFP4_GROUP_SIZE // 2), "U8"),
            "bytes": ((outputs, inputs // 2), "U8"),
            "words": ((outputs, inputs // 8), "U32"),
        }[self.layout]
        return {self.values: Part((values,), (dtype,)), self.exponents: Part((blocks,), ("U8",))}

    def check(self, parts: Parts, shape: Shape) -> None:  # noqa: ARG002 - the parts have it
        if bool((parts[self.exponents] == _E8M0_NAN).any()):
            raise UnreadableMatrixError(f"{self.exponents} has 255, which is not a number")

    def expand(self, parts: Parts, shape: Shape, rows: slice) -> Tensor:
        values = _unpack(as_bytes(parts[self.values][rows]), MXFP4_GROUP_SIZE)
        exponents = parts[self.exponents][rows].reshape(-1, 1).int() - _E8M0_BIAS
        # Exact, subnormal scales included, and three times as fast as ldexp of every number.
        return values.mul_(torch.ldexp(torch.ones(exponents.shape), exponents)).view(-1, shape[1])

    def packed_form(self, shape: Shape) -> PackedForm | None:
        return PackedForm(MXFP4_GROUP_SIZE, has_zeros=False) if shape[1] <= MAX_QUANTIZED_INPUTS else None

    def pack(self, parts: Parts, shape: Shape) -> Mxfp4Weight | None:
        content = as_bytes(parts[self.values]).reshape(shape[0], -1)
        exponents = parts[self.exponents].int() - _E8M0_BIAS
        is_used = (content.view(*exponents.shape, -1) & 0x77).amax(dim=-1) > 0
        exponents = exponents.where(is_used, 0)  # of a block of zeros any will do
        first, last = MXFP4_EXPONENTS[0], MXFP4_EXPONENTS[-1]
        if self.packed_form(shape) is None or bool(((exponents < first) | (exponents > last)).any()):
            return None
        return Mxfp4Weight(content, torch.ldexp(torch.ones(exponents.shape), exponents))


@dataclass(frozen=True)
class Nvfp4(MatrixFormat):
    """E2M1 values × an E4M3 scale for 16 inputs, × or / the scale of the matrix. The low 4 bits come first."""

    method: str
    values: str
    """Name of the tensor of values; the next field names the scale of the matrix."""
    matrix_scale: str
    multiplies: bool = False
    """The scale of the matrix is a factor; otherwise scales are divided by it."""

    @property
    def description(self) -> str:
        return f"{self.method}, NVFP4"

    def parts(self, shape: Shape) -> dict[str, Part]:
        outputs, inputs = shape
        check_multiple("inputs", inputs, _NV_BLOCK, "the numbers in a block")
        return {
            self.values: Part(((outputs, inputs // 2),), ("U8",)),
            "weight_scale": Part(((outputs, inputs // _NV_BLOCK),), ("F8_E4M3",)),
            self.matrix_scale: Part(((1,), ()), ("F32",)),
        }

    def check(self, parts: Parts, shape: Shape) -> None:  # noqa: ARG002 - the parts have it
        if not bool(parts["weight_scale"].float().isfinite().all()):
            raise UnreadableMatrixError("weight_scale has a NaN")
        if not self.multiplies and not bool(parts[self.matrix_scale].all()):
            raise UnreadableMatrixError(f"{self.matrix_scale} is 0, and scales are divided by it")

    def expand(self, parts: Parts, shape: Shape, rows: slice) -> Tensor:
        values = _unpack(parts[self.values][rows], _NV_BLOCK)
        scales, of_matrix = parts["weight_scale"][rows].float(), parts[self.matrix_scale]
        scales = scales * of_matrix if self.multiplies else scales / of_matrix
        return values.mul_(scales.view(-1, 1)).view(-1, shape[1])


def _unpack(content: Tensor, block: int) -> Tensor:
    """float32 [blocks, block] of bytes, the low 4 bits first."""
    pairs = torch.tensor([(E2M1[byte & 15], E2M1[byte >> 4]) for byte in range(256)])
    return pairs[content.flatten().int()].view(-1, block)
