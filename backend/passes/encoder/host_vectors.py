"""The steps of heads between their products, with arrays of the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from penstock.backend.checkpoint.encoders.encoder_config import PoolingMode


class HostVectors:
    """The methods of `EncoderOps` that all implementations on the CPU share."""

    logits_tokens = 64

    def pool(
        self, hidden: NDArray[np.float32], rows: Sequence[tuple[int, int]], modes: tuple[PoolingMode, ...]
    ) -> NDArray[np.float32]:
        return np.concatenate([np.stack([_pool(hidden[a:b], mode) for a, b in rows]) for mode in modes], axis=1)

    def splade(self, blocks: Iterable[NDArray[np.float32]]) -> NDArray[np.float32]:
        top = reduce(np.maximum, (block.max(axis=0, keepdims=True) for block in blocks))
        # log(1 + relu(x)) grows with x, so that of the maximum is the maximum.
        weights: NDArray[np.float32] = np.log1p(np.maximum(top, np.float32(0)))
        return weights

    def fetch(self, vectors: Sequence[NDArray[np.float32]]) -> OnHost:
        # Views are of the hidden states, which the next run overwrites.
        return OnHost([array if array.flags.owndata else array.copy() for array in vectors])

    def step(self, doing: str) -> AbstractContextManager[None]:  # noqa: ARG002 - the CPU does not break
        return nullcontext()


@dataclass(frozen=True, slots=True)
class OnHost:
    """Implements `Fetched`."""

    vectors: list[NDArray[np.float32]]

    def wait(self) -> list[NDArray[np.float32]]:
        return self.vectors


def _pool(hidden: NDArray[np.float32], mode: PoolingMode) -> NDArray[np.float32]:
    """The pooled vector of one row [n, hidden_size]."""
    count = np.float32(len(hidden))
    pooled: NDArray[np.float32]
    match mode:
        case "cls":
            pooled = hidden[0]
        case "lasttoken":
            pooled = hidden[-1]
        case "max":
            pooled = hidden.max(axis=0)
        case "mean":
            pooled = hidden.sum(axis=0) / count
        case "mean_sqrt_len":
            pooled = hidden.sum(axis=0) / np.sqrt(count)
        case "weightedmean":
            weights = np.arange(1, len(hidden) + 1, dtype=np.float32)
            pooled = (hidden * weights[:, None]).sum(axis=0) / weights.sum()
    return pooled
