"""Quantises to GGML's block types by the plainest rule: the largest magnitude, or least and largest, of each group.

For the types that the gguf package only dequantises. llama.cpp searches for better scales, so its files are better;
these are the same on every machine, and that is all that a comparison of two programs on one file needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np
from gguf.quants import IQ4_NL

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]

_NONLINEAR = np.array(IQ4_NL.kvalues, np.float32)
_NEAREST = np.abs(np.arange(-128, 129)[:, None] - _NONLINEAR).argmin(axis=1).astype(np.uint8)
"""Integer + 128 → code of the nearest of IQ4's values."""


def quantize(numbers: Floats, type_name: str) -> Bytes:
    """Rows of blocks of this type; numbers is [rows, inputs]."""
    recipe = _RECIPES.get(type_name)
    if recipe is None:
        content: Bytes = gguf.quantize(numbers, gguf.GGMLQuantizationType[type_name]).view(np.uint8)
        return content
    values, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    return recipe(numbers.reshape(-1, values)).reshape(len(numbers), -1)


def _pack(codes: NDArray[np.number], parts: int, width: int, bits: int) -> Bytes:
    """Bytes that hold `parts` codes each, which are `width` apart."""
    places = codes.astype(np.uint8).reshape(len(codes), -1, parts, width)
    shifts = np.arange(0, bits * parts, bits, dtype=np.uint8)[:, None]
    packed: Bytes = np.bitwise_or.reduce(places << shifts, axis=2).reshape(len(codes), -1)
    return packed


def _half(numbers: Floats) -> Bytes:
    return numbers.astype(np.float16).view(np.uint8)


def _divide(numbers: Floats, scales: Floats) -> Floats:
    quotients: Floats = np.divide(numbers, scales, out=np.zeros_like(numbers), where=scales != 0)
    return quotients


def _block_scale(scales: Floats, largest_code: int) -> tuple[Floats, Floats, Floats]:
    """The block's scale, the integers that it multiplies, and the scales that a reader then has."""
    block = (np.abs(scales).max(axis=1, keepdims=True) / largest_code).astype(np.float16).astype(np.float32)
    codes = np.round(_divide(scales, block))
    codes = np.clip(codes, -largest_code - 1, largest_code)
    return block, codes, (block * codes)[:, :, None]


def _symmetric(numbers: Floats, groups: int, largest_scale: int, offset: int) -> tuple[Floats, Floats, Floats]:
    """The block's scale, those of its groups, and codes from 0 to 2 * offset - 1, of which offset is zero."""
    groups_of = numbers.reshape(len(numbers), groups, -1)
    block, scales, read = _block_scale(np.abs(groups_of).max(axis=2) / (offset - 1), largest_scale)
    codes = np.round(_divide(groups_of, read)) + offset
    return block, scales, np.clip(codes, 0, 2 * offset - 1)


def _affine(
    numbers: Floats, groups: int, largest_scale: int, largest_code: int
) -> tuple[Bytes, Floats, Floats, Floats]:
    """Both scales of the block as bytes, scales and minima of its groups, and codes."""
    groups_of = numbers.reshape(len(numbers), groups, -1)
    least = np.maximum(-groups_of.min(axis=2), 0)
    steps = (np.maximum(groups_of.max(axis=2), 0) + least) / largest_code
    block, scales, read = _block_scale(steps, largest_scale)
    block_min, minima, read_min = _block_scale(least, largest_scale)
    codes = np.round(_divide(groups_of + read_min, read))
    return np.hstack([_half(block), _half(block_min)]), scales, minima, np.clip(codes, 0, largest_code)


def _six_bit_pairs(scales: Floats, minima: Floats) -> Bytes:
    """Eight scales and eight minima of 6 bits in 12 bytes, as Q4_K and Q5_K have them."""
    s, m = scales.astype(np.uint8), minima.astype(np.uint8)
    high = [part[:, :4] | (part[:, 4:] >> 4) << 6 for part in (s, m)]
    return np.hstack([*high, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4])


def _q2_k(numbers: Floats) -> Bytes:
    block, scales, minima, codes = _affine(numbers, 16, 15, 3)
    return np.hstack([(scales + 16 * minima).astype(np.uint8), _pack(codes, 4, 32, 2), block])


def _q3_k(numbers: Floats) -> Bytes:
    block, scales, codes = _symmetric(numbers, 16, 31, 4)
    s, q = (scales + 32).astype(np.uint8), codes.astype(np.uint8)
    packed_scales = [_pack(s & 15, 2, 8, 4), _pack(s >> 4, 4, 4, 2)]
    return np.hstack([_pack(q >> 2, 8, 32, 1), _pack(q & 3, 4, 32, 2), *packed_scales, _half(block)])


def _q4_k(numbers: Floats) -> Bytes:
    block, scales, minima, codes = _affine(numbers, 8, 63, 15)
    return np.hstack([block, _six_bit_pairs(scales, minima), _pack(codes, 2, 32, 4)])


def _q5_k(numbers: Floats) -> Bytes:
    block, scales, minima, codes = _affine(numbers, 8, 63, 31)
    q = codes.astype(np.uint8)
    return np.hstack([block, _six_bit_pairs(scales, minima), _pack(q >> 4, 8, 32, 1), _pack(q & 15, 2, 32, 4)])


def _q6_k(numbers: Floats) -> Bytes:
    block, scales, codes = _symmetric(numbers, 16, 127, 32)
    q = codes.astype(np.uint8)
    packed_scales = scales.astype(np.int8).view(np.uint8)
    return np.hstack([_pack(q & 15, 2, 64, 4), _pack(q >> 4, 4, 32, 2), packed_scales, _half(block)])


def _nearest(numbers: Floats) -> Bytes:
    """Codes of IQ4's values."""
    codes: Bytes = _NEAREST[np.clip(np.round(numbers), -128, 128).astype(np.int16) + 128]
    return codes


def _iq4_nl(numbers: Floats) -> Bytes:
    scale = (np.abs(numbers).max(axis=1, keepdims=True) / 113).astype(np.float16).astype(np.float32)
    return np.hstack([_half(scale), _pack(_nearest(_divide(numbers, scale)), 2, 16, 4)])


def _iq4_xs(numbers: Floats) -> Bytes:
    groups_of = numbers.reshape(len(numbers), 8, 32)
    block, scales, read = _block_scale(np.abs(groups_of).max(axis=2) / 113, 31)
    s = (scales + 32).astype(np.uint8)
    codes = _nearest(_divide(groups_of, read))
    high = [_pack(part, 4, 1, 2) for part in (s[:, :4] >> 4, s[:, 4:] >> 4)]
    return np.hstack([_half(block), *high, _pack(s & 15, 2, 1, 4), _pack(codes, 2, 16, 4)])


_RECIPES: dict[str, Callable[[Floats], Bytes]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
