"""Heads: from hidden states to the vectors of `StepOutput.pooled`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backend.checkpoint.encoders.encoder_config import Activation, Head
    from penstock.backend.checkpoint.encoders.tensors import WeightSource
    from penstock.backend.passes.encoder.ops import Array, EncoderOps, Linear, Vectors


@dataclass(frozen=True, slots=True)
class _Layer:
    linear: Linear
    activation: Activation
    norm: Array | None


class PackedHead:
    """The packed weights of a head."""

    def __init__(self, head: Head, ops: EncoderOps, weights: WeightSource, words: Tensor) -> None:
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

    def of_pooled(self, x: Vectors) -> Vectors:
        """[Q, width] from `EncoderOps.pool` of Q rows."""
        return self._apply(self._layers, x)

    def of_tokens(self, hidden: Vectors) -> Vectors:
        """[n, width], or [1, width] of a sparse head, from a row's hidden states [n, hidden_size]."""
        if not self._is_sparse:
            return self._apply(self._layers, hidden)
        count = self._ops.logits_tokens
        blocks = (hidden[first : first + count] for first in range(0, len(hidden), count))
        return self._ops.splade(self._apply(self._layers, block) for block in blocks)

    @property
    def is_of_row(self) -> bool:
        """The head returns one vector for each row; otherwise one for each token."""
        return bool(self.pooling) or self._is_sparse

    def _apply(self, layers: list[_Layer], x: Vectors) -> Vectors:
        for layer in layers:
            x = self._ops.dense(x, layer.linear, layer.activation)
            if layer.norm is not None:
                x = self._ops.dense_norm(x, layer.norm)
        return x
