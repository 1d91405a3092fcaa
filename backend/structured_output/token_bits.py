"""Sets of tokens as bits, the form in which a forward pass receives masks. See `TokenMasks.bits`."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    TokenBits: TypeAlias = NDArray[np.uint32]
    """[ceil(vocab_size / 32)] one bit per token: bit i % 32 of word i // 32 is token i."""


def bits_of(token_ids: Iterable[int], vocab_size: int) -> TokenBits:
    """Raises IndexError for a token id outside the vocabulary, rounded up to a multiple of 32."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


@lru_cache(maxsize=1)
def bits_of_all(vocab_size: int) -> TokenBits:
    """Every token of the vocabulary. Callers share the array and must not change it."""
    return bits_of(range(vocab_size), vocab_size)


def set_bit(bits: TokenBits, token_id: int) -> None:
    bits[token_id >> 5] |= np.uint32(1 << (token_id & 31))


def clear_bit(bits: TokenBits, token_id: int) -> None:
    bits[token_id >> 5] &= ~np.uint32(1 << (token_id & 31))
