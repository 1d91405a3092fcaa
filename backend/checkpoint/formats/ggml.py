"""The block types of GGML: rows of blocks of 32 or 256 numbers, each block with scales of its own.

Arithmetic is that of GGML's reference code, in fp32 and in its order, so the numbers are the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from penstock.backend.checkpoint.formats.integers import int4_form
from penstock.backend.checkpoint.formats.matrix_format import MatrixFormat, Part, Shape, check_multiple
from penstock.backend.checkpoint.quantized_weights import Int4Weight

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from penstock.backend.checkpoint.formats.matrix_format import Parts
    from penstock.backend.checkpoint.quantized_weights import PackedForm, QuantizedWeight

_SMALL_BLOCK = 32
_LARGE_BLOCK = 256
_Q4_0_ZERO = 8
_IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class BlockType:
    """expand receives uint8 [blocks, num_bytes] and returns float32 [blocks, values]."""

    values: int
    num_bytes: int
    expand: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class GgmlMatrix(MatrixFormat):
    """A matrix in blocks of one type, stored as rows of bytes."""

    type_name: str

    @property
    def description(self) -> str:
        return f"GGUF, {self.type_name}"

    @property
    def _type(self) -> BlockType:
        return BLOCK_TYPES[self.type_name]

    def parts(self, shape: Shape) -> dict[str, Part]:
        outputs, inputs = shape
        check_multiple("inputs", inputs, self._type.values, "the numbers in a block")
        return {"weight": Part(((outputs, inputs // self._type.values * self._type.num_bytes),), ("U8",))}

    def expand(self, parts: Parts, shape: Shape, rows: slice) -> Tensor:
        content = parts["weight"][rows]
        return self._type.expand(content.view(-1, self._type.num_bytes)).view(len(content), shape[1])

    def packed_form(self, shape: Shape) -> PackedForm | None:
        return int4_form(shape[1], _SMALL_BLOCK) if self.type_name == "Q4_0" else None

    def pack(self, parts: Parts, shape: Shape) -> QuantizedWeight | None:
        if self.packed_form(shape) is None:
            return None
        outputs, inputs = shape
        blocks = parts["weight"].view(outputs, -1, BLOCK_TYPES["Q4_0"].num_bytes)
        scales = blocks[:, :, :2].contiguous().view(torch.float16)[:, :, 0].float()
        if not bool(scales.isfinite().all()):
            return None
        values = _nibbles(blocks[:, :, 2:])
        pairs = (values[:, :, ::2] | (values[:, :, 1::2] << 4)).view(outputs, inputs // 2)
        return Int4Weight(pairs, scales, torch.full(scales.shape, _Q4_0_ZERO, dtype=torch.uint8), _SMALL_BLOCK)


def _halves(blocks: Tensor, first: int) -> Tensor:
    """float32 [blocks, 1] of the binary16 at a byte of each block."""
    return blocks[:, first : first + 2].contiguous().view(torch.float16).float()


def _nibbles(content: Tensor) -> Tensor:
    """uint8 [..., 2 × n] of [..., n]: all low 4 bits, then all high ones."""
    return torch.cat([content & 15, content >> 4], dim=-1)


def _fifth_bits(content: Tensor) -> Tensor:
    """uint8 [blocks, 32] from 4 bytes: 16 where the bit is set."""
    bits = content[:, :, None] >> torch.arange(8, dtype=torch.uint8)
    return (bits.view(len(content), 32) & 1) << 4


def _q8_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _q4_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - _Q4_0_ZERO)


def _q4_1(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _halves(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _halves(blocks, 0) * (values.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    values = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _halves(blocks, 0) * values.float() + _halves(blocks, 2)


def _iq4_nl(blocks: Tensor) -> Tensor:
    table = torch.tensor(_IQ4_NL_VALUES, dtype=torch.float32)
    return _halves(blocks, 0) * table[_nibbles(blocks[:, 2:]).long()]


def _scales_and_minima(content: Tensor) -> tuple[Tensor, Tensor]:
    """Both float32 [blocks, 8], of 6 bits each, from 12 bytes.

    Bytes 0 to 3 and 4 to 7 have the first four scales and minima; their upper two bits are those of the last four,
    whose lower four bits are in bytes 8 to 11.
    """
    low, middle, last = content[:, :4], content[:, 4:8], content[:, 8:]
    scales = torch.cat([low & 63, (last & 15) | (low >> 6 << 4)], dim=1)
    minima = torch.cat([middle & 63, (last >> 4) | (middle >> 6 << 4)], dim=1)
    return scales.float(), minima.float()


def _scale_large(blocks: Tensor, values: Tensor) -> Tensor:
    """Q4_K and Q5_K: scale × value - minimum, values uint8 [blocks, 8, 32]."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scaled = (_halves(blocks, 0) * scales)[:, :, None] * values.float()
    return (scaled - (_halves(blocks, 2) * minima)[:, :, None]).view(len(blocks), _LARGE_BLOCK)


def _q4_k(blocks: Tensor) -> Tensor:
    return _scale_large(blocks, _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    high = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]
    return _scale_large(blocks, low | ((high & 1) << 4))


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 8, 32)
    high = blocks[:, 128:192].view(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    values = (low | ((high & 3) << 4).view(-1, 8, 32)).float() - 32
    scales = _halves(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (scales[:, :, None] * values.view(-1, 16, 16)).view(len(blocks), _LARGE_BLOCK)


BLOCK_TYPES = {
    "Q8_0": BlockType(_SMALL_BLOCK, 34, _q8_0),
    "Q4_0": BlockType(_SMALL_BLOCK, 18, _q4_0),
    "Q4_1": BlockType(_SMALL_BLOCK, 20, _q4_1),
    "Q5_0": BlockType(_SMALL_BLOCK, 22, _q5_0),
    "Q5_1": BlockType(_SMALL_BLOCK, 24, _q5_1),
    "IQ4_NL": BlockType(_SMALL_BLOCK, 18, _iq4_nl),
    "Q4_K": BlockType(_LARGE_BLOCK, 144, _q4_k),
    "Q5_K": BlockType(_LARGE_BLOCK, 176, _q5_k),
    "Q6_K": BlockType(_LARGE_BLOCK, 210, _q6_k),
}
