"""Heads: from hidden states to the vectors of `StepOutput.pooled`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.backend.checkpoint.encoders.encoder_config import Activation, Head, PoolingMode
    from penstock.backend.checkpoint.encoders.weights import EncoderWeights
    from penstock.backend.passes.encoder.ops import Array, EncoderOps, Linear

_LOGITS_BLOCK_TOKENS = 64
"""Tokens whose logits over the vocabulary are in memory at a time."""


@dataclass(frozen=True, slots=True)
class _Layer:
    linear: Linear
    activation: Activation
    norm: Array | None


class PackedHead:
    """The packed weights of a head."""

    def __init__(self, head: Head, ops: EncoderOps, weights: EncoderWeights, words: Tensor) -> None:
        """words: the table that a layer without a weight of its own uses."""
        self._ops = ops
        self.pooling = head.pooling
        self._is_sparse = head.kind == "sparse"
        self._layers: list[_Layer] = []
        for layer in head.layers:
            plain = weights.head_layer(layer)
            linear = ops.pack_linear(words if plain.weight is None else plain.weight, plain.bias)
            norm = None if plain.norm is None else ops.vector(plain.norm)
            self._layers.append(_Layer(linear, layer.activation, norm))

    def of_pooled(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """[Q, width] from `pool_tokens` of Q rows."""
        return self._apply(self._layers, x)

    def of_tokens(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """[n, width], or [width] of a sparse head, from a row's hidden states [n, hidden_size]."""
        if not self._is_sparse:
            return self._apply(self._layers, hidden).copy()
        blocks = (hidden[i : i + _LOGITS_BLOCK_TOKENS] for i in range(0, len(hidden), _LOGITS_BLOCK_TOKENS))
        top = reduce(np.maximum, (self._apply(self._layers, block).max(axis=0) for block in blocks))
        # log(1 + relu(x)) grows with x, so that of the maximum is the maximum. A NaN stays one.
        weights: NDArray[np.float32] = np.log1p(np.maximum(top, np.float32(0)))
        return weights

    def _apply(self, layers: list[_Layer], x: NDArray[np.float32]) -> NDArray[np.float32]:
        for layer in layers:
            x = self._ops.dense(x, layer.linear, layer.activation)
            if layer.norm is not None:
                x = self._ops.dense_norm(x, layer.norm)
        return x


def pool_tokens(hidden: NDArray[np.float32], modes: tuple[PoolingMode, ...]) -> NDArray[np.float32]:
    """The pooled vectors of one row [n, hidden_size], one after the other. As in sentence-transformers."""
    return _pool(hidden, modes[0]) if len(modes) == 1 else np.concatenate([_pool(hidden, mode) for mode in modes])


def _pool(hidden: NDArray[np.float32], mode: PoolingMode) -> NDArray[np.float32]:
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
