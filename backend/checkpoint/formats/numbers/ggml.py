"""The block types of GGML: rows of blocks of 32 or 256 numbers, each block with its own scales.

A block's numbers are integers times scales, less minima in some types. Dequantised in fp32 they have the same bits as
from GGML's reference code: all products are exact there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from penstock.backend.checkpoint.formats.matrix_format import (
    BLOCK_VALUES,
    MatrixFormat,
    Part,
    Parts,
    Shape,
    UnreadableMatrixError,
    check_multiple,
    row_blocks,
)
from penstock.backend.checkpoint.formats.numbers.float4 import Mxfp4
from penstock.backend.checkpoint.formats.numbers.ggml_codebooks import CODEBOOK_TYPES, CodedNumbers, read_iq3_s
from penstock.backend.checkpoint.formats.numbers.integers import int4_form
from penstock.backend.checkpoint.weight_forms.quantized_forms import GroupedForm, PackedForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import (
    E2M1,
    IQ4_VALUES,
    MAX_QUANTIZED_INPUTS,
    MXFP4_EXPONENTS,
    BlockWeight,
    GroupedWeight,
    Int4Weight,
    QuantizedWeight,
    SimpleWeight,
    StackedWeight,
)
from penstock.backend.checkpoint.weight_forms.stacked_weights import stack_weights
from penstock.backend.lazy_torch import Tensor, torch

_SMALL_BLOCK = 32
_LARGE_BLOCK = 256
_SMALL_GROUP = 16
_Q4_0 = "Q4_0"
_Q4_0_ZERO = 8
_MXFP4 = "MXFP4"
_MXFP4_SCALES = Mxfp4("GGUF", "values", "exponents", "bytes")
_MXFP4_BIAS = 127
_INFINITE_HIGH_BYTE = 0x7C
"""Bits of a binary16 number that are all set if it is not finite."""
_PACKED_BY_KERNELS = {
    "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
    "IQ4_NL": 20, "IQ4_XS": 23, "MXFP4": 39,
}  # fmt: skip
"""Types whose blocks kernels/linears/ggml_blocks.h reads, and their numbers in GGML."""
_DOUBLED_E2M1 = tuple(int(2 * value) for value in E2M1)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """The content of blocks. A number is scale × value, minus the minimum if there is one."""

    values: Tensor
    """int8 [blocks, values]; float32 of types that no form holds."""
    factors: Tensor
    """float32 [blocks, 1 or 2], from binary16: scale, then minimum."""
    multipliers: Tensor | None = None
    """int8 [blocks, groups, 1 or 2]: multipliers of the factors, for each group of the block; float32 of types that no
    form holds."""
    are_codes: bool = False
    """The values are places of IQ4_VALUES, not numbers."""

    def expand(self) -> Tensor:
        """float32 [blocks, values]"""
        factors = self.factors[:, None]
        if self.multipliers is not None:
            factors = factors * self.multipliers.float()
        values = torch.tensor(IQ4_VALUES, dtype=torch.int8)[self.values.int()] if self.are_codes else self.values
        numbers = values.view(len(values), factors.shape[1], -1) * factors[:, :, :1]
        if factors.shape[2] == 2:
            numbers -= factors[:, :, 1:]
        return numbers.view(self.values.shape)


@dataclass(frozen=True, slots=True)
class BlockType:
    """A block type. read receives uint8 [blocks, num_bytes]."""

    num_bytes: int
    form: GroupedForm | None
    """The kernels' form of groups that holds the same numbers; None if there is none."""
    read: Callable[[Tensor], _Numbers]
    values: int
    """Numbers of a block."""
    scale_bytes: tuple[int, ...]
    """Byte offsets of the binary16 numbers in a block."""


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
        return self._read(content).expand().view(len(content), shape[1])

    def packed_form(self, shape: Shape) -> PackedForm | GroupedForm | None:
        if self.type_name == _Q4_0:
            return int4_form(shape[1], _SMALL_BLOCK)
        if self.type_name == _MXFP4:
            return _MXFP4_SCALES.packed_form(shape)
        return self._type.form if shape[1] <= MAX_QUANTIZED_INPUTS else None

    def check(self, parts: Parts, shape: Shape) -> None:  # noqa: ARG002 - blocks of any shape
        blocks = self._blocks(parts["weight"])
        for byte in self._type.scale_bytes:
            if bool((blocks[:, byte + 1] & _INFINITE_HIGH_BYTE == _INFINITE_HIGH_BYTE).any()):
                raise UnreadableMatrixError("a block's scale is not finite")

    def pack(self, parts: Parts, shape: Shape) -> QuantizedWeight | None:
        content, form = parts["weight"], self.packed_form(shape)
        if form is None or (self.type_name == _MXFP4 and not _have_packed_scales(self._blocks(content))):
            return None
        decode = partial(self._decode, form=form, inputs=shape[1])
        number = _PACKED_BY_KERNELS.get(self.type_name)
        return decode(content) if number is None else BlockWeight(form, number, content, shape[1], decode)

    def _decode(self, content: Tensor, form: PackedForm | GroupedForm, inputs: int) -> SimpleWeight:
        shape = (len(content), inputs)
        decoded = (self._decode_rows(content[rows], form, inputs) for rows in row_blocks(shape, BLOCK_VALUES))
        weight = stack_weights(decoded, form, shape[0])
        if weight is None or isinstance(weight, StackedWeight):
            raise TypeError(f"{self.description} is not in the form {form}")
        return weight

    def _decode_rows(self, content: Tensor, form: PackedForm | GroupedForm, inputs: int) -> SimpleWeight | None:
        outputs = len(content)
        if self.type_name == _MXFP4:
            parts = _mxfp4_parts(content.view(outputs, -1, self._type.num_bytes))
            return _MXFP4_SCALES.pack(parts, (outputs, inputs))
        numbers = self._read(content)
        if isinstance(form, PackedForm):
            scales = numbers.factors.view(outputs, -1)
            zeros = torch.full(scales.shape, _Q4_0_ZERO, dtype=torch.uint8)
            pairs = _pairs(numbers.values.add_(_Q4_0_ZERO))
            return Int4Weight(pairs.view(outputs, inputs // 2), scales, zeros, _SMALL_BLOCK)
        multipliers = torch.empty(0, dtype=torch.int8) if numbers.multipliers is None else numbers.multipliers
        return GroupedWeight(
            form,
            (_pairs(numbers.values) if form.bits == 4 else numbers.values).reshape(outputs, -1),
            numbers.factors.view(outputs, -1, form.num_factors),
            multipliers.view(outputs, inputs // form.group_size if form.has_multipliers else 0, form.num_factors),
        )

    def _read(self, content: Tensor) -> _Numbers:
        return self._type.read(self._blocks(content))

    def _blocks(self, content: Tensor) -> Tensor:
        return content.view(-1, self._type.num_bytes)


def _halves(blocks: Tensor, *first_bytes: int) -> Tensor:
    """Read float32 [blocks, n] from the binary16 numbers that begin at these bytes of each block."""
    return torch.cat([blocks[:, byte : byte + 2].contiguous().view(torch.float16) for byte in first_bytes], 1).float()


def _nibbles(content: Tensor) -> Tensor:
    """Split uint8 [..., n] into [..., 2 × n]: all low 4 bits, then all high ones."""
    return torch.cat([content & 15, content >> 4], dim=-1)


def _pairs(values: Tensor) -> Tensor:
    """Pack int8 [n, m] from 0 to 15 into uint8 [n, m / 2]: two in a byte, the even one in the low bits."""
    numbers = values.view(torch.uint8)
    return numbers[:, ::2] | (numbers[:, 1::2] << 4)


def _fifth_bits(content: Tensor) -> Tensor:
    """Read uint8 [blocks, 32] from 4 bytes: 16 where the bit is set."""
    bits = content[:, :, None] >> torch.arange(8, dtype=torch.uint8)
    return (bits.view(len(content), 32) & 1) << 4


def _q8_0(blocks: Tensor) -> _Numbers:
    return _Numbers(blocks[:, 2:].view(torch.int8), _halves(blocks, 0))


def _q4_0(blocks: Tensor) -> _Numbers:
    return _Numbers(_nibbles(blocks[:, 2:]).view(torch.int8) - _Q4_0_ZERO, _halves(blocks, 0))


def _q5_0(blocks: Tensor) -> _Numbers:
    values = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _Numbers(values.view(torch.int8) - 16, _halves(blocks, 0))


def _iq4_nl(blocks: Tensor) -> _Numbers:
    return _Numbers(_nibbles(blocks[:, 2:]).view(torch.int8), _halves(blocks, 0), are_codes=True)


def _mxfp4(blocks: Tensor) -> _Numbers:
    """Read MXFP4. The values are doubled to be integers, so the scales are halved."""
    exponents = blocks[:, :1].int() - (_MXFP4_BIAS + 1)
    scales = torch.ldexp(torch.ones(exponents.shape), exponents)
    return _Numbers(torch.tensor(_DOUBLED_E2M1, dtype=torch.int8)[_nibbles(blocks[:, 1:]).long()], scales)


def _mxfp4_parts(blocks: Tensor) -> dict[str, Tensor]:
    """The parts of `Mxfp4` from uint8 [outputs, blocks, 17]."""
    values = _nibbles(blocks[:, :, 1:])
    pairs = values[:, :, ::2] | (values[:, :, 1::2] << 4)
    return {"values": pairs.flatten(1), "exponents": blocks[:, :, 0]}


def _have_packed_scales(blocks: Tensor) -> bool:
    """Whether the form of MXFP4 holds the scales of all blocks that are not zeros."""
    first, last = _MXFP4_BIAS + MXFP4_EXPONENTS[0], _MXFP4_BIAS + MXFP4_EXPONENTS[-1]
    outside = (blocks[:, 0] < first) | (blocks[:, 0] > last)
    return not bool((blocks[outside, 1:] & 0x77).any())


def _offset(values: Tensor, blocks: Tensor) -> _Numbers:
    """Numbers scale × value + offset, for uint8 values: the offset is a negative minimum."""
    return _Numbers(values.view(torch.int8), _halves(blocks, 0, 2) * torch.tensor((1.0, -1.0)))


def _q4_1(blocks: Tensor) -> _Numbers:
    return _offset(_nibbles(blocks[:, 4:]), blocks)


def _q5_1(blocks: Tensor) -> _Numbers:
    return _offset(_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8]), blocks)


def _scales_and_minima(content: Tensor) -> Tensor:
    """Read int8 [blocks, 8, 2], of 6 bits each, from 12 bytes.

    Bytes 0 to 3 and 4 to 7 have the first four scales and minima; their upper two bits belong to the last four, whose
    lower four bits are in bytes 8 to 11.
    """
    low, middle, last = content[:, :4], content[:, 4:8], content[:, 8:]
    scales = torch.cat([low & 63, (last & 15) | (low >> 6 << 4)], dim=1)
    minima = torch.cat([middle & 63, (last >> 4) | (middle >> 6 << 4)], dim=1)
    return torch.stack([scales, minima], dim=-1).view(torch.int8)


def _with_minima(values: Tensor, blocks: Tensor) -> _Numbers:
    """Q4_K and Q5_K, from uint8 values [blocks, 8, 32]."""
    integers = values.view(len(blocks), _LARGE_BLOCK).view(torch.int8)
    return _Numbers(integers, _halves(blocks, 0, 2), _scales_and_minima(blocks[:, 4:16]))


def _q4_k(blocks: Tensor) -> _Numbers:
    return _with_minima(_nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32), blocks)


def _q5_k(blocks: Tensor) -> _Numbers:
    low = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    high = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]
    return _with_minima(low | ((high & 1) << 4), blocks)


def _q6_k(blocks: Tensor) -> _Numbers:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 8, 32)
    high = blocks[:, 128:192].view(-1, 2, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    values = (low | ((high & 3) << 4).view(-1, 8, 32)).view(len(blocks), _LARGE_BLOCK)
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    return _Numbers(values.view(torch.int8) - 32, _halves(blocks, 208), scales[:, :, None])


def _pairs_of_bits(content: Tensor) -> Tensor:
    """Split uint8 [blocks, n] into [blocks, 4 × n] pairs of bits: of each 32 bytes all lowest pairs, then the next."""
    return (content.view(len(content), -1, 1, 32) >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3).flatten(1)


def _q2_k(blocks: Tensor) -> _Numbers:
    multipliers = torch.stack([blocks[:, :16] & 15, blocks[:, :16] >> 4], dim=-1).view(torch.int8)
    return _Numbers(
        _pairs_of_bits(blocks[:, 16:80].contiguous()).view(torch.int8), _halves(blocks, 80, 82), multipliers
    )


def _q3_k(blocks: Tensor) -> _Numbers:
    """Read Q3_K. Scales have 6 bits: the lower 4 in bytes 0 to 7 of their 12, the upper 2 in the other bytes."""
    high = (blocks[:, None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).flatten(1)
    values = _pairs_of_bits(blocks[:, 32:96].contiguous()) | high << 2
    upper = blocks[:, None, 104:108] >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None] & 3
    scales = _nibbles(blocks[:, 96:104]) | upper.flatten(1) << 4
    return _Numbers(values.view(torch.int8) - 4, _halves(blocks, 108), scales.view(torch.int8)[:, :, None] - 32)


def _iq4_xs(blocks: Tensor) -> _Numbers:
    """Read IQ4_XS. Scales have 6 bits: the upper 2 in bytes 2 and 3, the lower 4 in the next four."""
    upper = (blocks[:, 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3).flatten(1)
    lower = torch.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], dim=-1).flatten(1)
    codes = _nibbles(blocks[:, 8:].view(-1, 8, 16)).flatten(1).view(torch.int8)
    multipliers = (lower | upper << 4).view(torch.int8)[:, :, None] - 32
    return _Numbers(codes, _halves(blocks, 0), multipliers, are_codes=True)


def _ternary(values: Tensor, scales: Tensor) -> _Numbers:
    multipliers = torch.ones(len(values), _LARGE_BLOCK // _SMALL_GROUP, 1, dtype=torch.int8)
    return _Numbers(values.to(torch.int8) - 1, scales, multipliers)


def _tq1_0(blocks: Tensor) -> _Numbers:
    """Read TQ1_0: a byte has 5 digits of base 3, as the fraction of 256 that they are of 3^5; the last bytes have 4."""

    def digits(content: Tensor, count: int) -> Tensor:
        powers = torch.tensor([1, 3, 9, 27, 81][:count], dtype=torch.uint8)[:, None]
        return ((content[:, None] * powers).int() * 3 >> 8).flatten(1)

    parts = digits(blocks[:, :32], 5), digits(blocks[:, 32:48], 5), digits(blocks[:, 48:52], 4)
    return _ternary(torch.cat(parts, dim=1), _halves(blocks, 52))


def _tq2_0(blocks: Tensor) -> _Numbers:
    return _ternary(_pairs_of_bits(blocks[:, :64].contiguous()), _halves(blocks, 64))


def _coded(read: Callable[[Tensor], CodedNumbers]) -> Callable[[Tensor], _Numbers]:
    return lambda blocks: _Numbers(*read(blocks))


def _small(
    num_bytes: int,
    bits: int,
    read: Callable[[Tensor], _Numbers],
    *scale_bytes: int,
    codebook: Literal["", "iq4"] = "",
) -> BlockType:
    """A type with two numbers in binary16 has minima."""
    form = GroupedForm(bits, _SMALL_BLOCK, _SMALL_BLOCK, len(scale_bytes) == 2, codebook)
    return BlockType(num_bytes, form, read, _SMALL_BLOCK, scale_bytes)


def _large(
    num_bytes: int,
    bits: int,
    group_size: int,
    read: Callable[[Tensor], _Numbers],
    *scale_bytes: int,
    codebook: Literal["", "iq4"] = "",
) -> BlockType:
    """As `_small`."""
    form = GroupedForm(bits, group_size, _LARGE_BLOCK, len(scale_bytes) == 2, codebook)
    return BlockType(num_bytes, form, read, _LARGE_BLOCK, scale_bytes)


BLOCK_TYPES = {
    "Q8_0": _small(34, 8, _q8_0, 0),
    _Q4_0: _small(18, 8, _q4_0, 0),
    "Q4_1": _small(20, 4, _q4_1, 0, 2),
    "Q5_0": _small(22, 5, _q5_0, 0),
    "Q5_1": _small(24, 5, _q5_1, 0, 2),
    "IQ4_NL": _small(18, 4, _iq4_nl, 0, codebook="iq4"),
    _MXFP4: BlockType(17, None, _mxfp4, _SMALL_BLOCK, ()),
    "Q2_K": _large(84, 2, 16, _q2_k, 80, 82),
    "Q3_K": _large(110, 3, 16, _q3_k, 108),
    "Q4_K": _large(144, 4, 32, _q4_k, 0, 2),
    "Q5_K": _large(176, 5, 32, _q5_k, 0, 2),
    "Q6_K": _large(210, 6, 16, _q6_k, 208),
    "IQ4_XS": _large(136, 4, 32, _iq4_xs, 0, codebook="iq4"),
    "TQ1_0": _large(54, 3, 16, _tq1_0, 52),
    "TQ2_0": _large(66, 3, 16, _tq2_0, 64),
    "IQ3_S": _large(110, 5, 32, _coded(read_iq3_s), 0),
    **{
        name: BlockType(size, None, _coded(read), _LARGE_BLOCK, scale_bytes)
        for name, (size, read, scale_bytes) in CODEBOOK_TYPES.items()
    },
}
