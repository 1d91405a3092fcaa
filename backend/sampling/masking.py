"""Applies a step's token masks to logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.backend.forward_pass import TokenMasks

_ALLOWED = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.bool_)
_CEILINGS = np.where(_ALLOWED, np.float32(np.inf), np.float32(-np.inf))
"""[256, 8] for each byte of a mask, the upper bound of the logits of its eight tokens."""


def masked_rows(logits: NDArray[np.float32], masks: TokenMasks) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield each masked row of logits [L, V] with its masked values, [V]: -inf where not allowed. A NaN stays a NaN.

    The values are valid until the next row: one buffer is reused, which stays in the CPU cache, and logits are not
    copied.
    """
    values = np.empty(logits.shape[1], np.float32)
    ceiling = np.empty((masks.bits.shape[1] * 4, 8), np.float32)
    for row, bits in zip(masks.rows.tolist(), masks.bits.view(np.uint8), strict=True):
        np.take(_CEILINGS, bits, axis=0, out=ceiling, mode="clip")
        yield row, np.minimum(logits[row], ceiling.reshape(-1)[: len(values)], out=values)
