"""The order of the operations of an encoder and its heads, the same for all architectures.

As in BERT (arXiv 1810.04805), with the variations that EncoderConfig declares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from penstock.backend.checkpoint.encoders.encoder_config import Activation, EncoderConfig, Head
from penstock.backend.checkpoint.encoders.tensors import EncoderLayerWeights, WeightSource
from penstock.backend.checkpoint.quantization.quantizer import BLOCK_VALUES, UnquantizableError, quantize
from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
from penstock.backend.errors import StartupError
from penstock.backend.passes.encoder.ops import (
    Array,
    EmbeddingTables,
    EncoderOps,
    EncoderRows,
    FirstTokens,
    LayerAttention,
    Linear,
    RelativePositions,
    Vectors,
)


@dataclass(frozen=True, slots=True)
class _HeadLayer:
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
        self._layers: list[_HeadLayer] = []
        for layer in head.layers:
            plain = weights.head_layer(layer)
            linear = ops.pack_linear(words if plain.weight is None else plain.weight, plain.bias)
            norm = None if plain.norm is None else ops.vector(plain.norm)
            self._layers.append(_HeadLayer(linear, layer.activation, norm))

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

    def _apply(self, layers: list[_HeadLayer], x: Vectors) -> Vectors:
        for layer in layers:
            x = self._ops.dense(x, layer.linear, layer.activation)
            if layer.norm is not None:
                x = self._ops.dense_norm(x, layer.norm)
        return x


_MAX_DISTANCE = 128
"""From it on all relative positions share a bias, as in T5 (arXiv 1910.10683) and MPNet."""


@dataclass(frozen=True, slots=True)
class _Layer:
    attention: LayerAttention
    attention_norm: Array | None
    qkv: Linear
    output: Linear
    mlp_in: Linear
    mlp_out: Linear
    mlp_norm: Array


class EncoderModel:
    """The packed weights, and the computation of rows."""

    def __init__(
        self, config: EncoderConfig, ops: EncoderOps, weights: WeightSource, dtype: torch.dtype, *, int8: bool
    ) -> None:
        """Packs the weights layer by layer; int8: those of the layers' linears are quantised."""
        self._config = config
        self._ops = ops
        words = weights.words()
        self._tables = EmbeddingTables(
            words=ops.table(words),
            positions=_optional(ops, weights.table("positions", dtype)),
            token_types=_optional(ops, weights.table("token_types", dtype)),
        )
        self._embedding_norm = ops.vector(weights.embedding_norm())
        positions = weights.table("relative_positions", torch.float32)
        if positions is not None:
            scale, shift = weights.relative_norm().chunk(2)
            positions = functional.layer_norm(positions, (config.hidden_size,), scale, shift, config.norm_eps)
        buckets = weights.table("relative_bias", torch.float32)
        bias = None if buckets is None else ops.vector(relative_biases(buckets, config.max_context_tokens))
        self._layers = [
            _pack_layer(config, ops, weights.layer(i), _attention(config, bias, i), positions, int8=int8)
            for i in range(config.num_layers)
        ]
        final_norm = weights.final_norm()
        self._final_norm = None if final_norm is None else ops.vector(final_norm)
        self.heads = {head.kind: PackedHead(head, ops, weights, words) for head in config.heads}

    def run(self, rows: EncoderRows) -> Vectors:
        """The hidden states, [T, hidden_size]; those of `rows.only_first` may have others than the first undefined.

        The next call may overwrite them.
        """
        return self._ops.run(rows, self._encode)

    def _encode(self, first_tokens: FirstTokens | None) -> Array:
        ops = self._ops
        residual = ops.embed(self._tables)
        x = ops.norm_in_place(residual, self._embedding_norm)
        for layer in self._layers:
            if self._config.norm_first:
                x = ops.norm(residual, layer.attention_norm)
            qkv = ops.linear(x, layer.qkv)
            if first_tokens is not None and layer is self._layers[-1]:
                attended = first_tokens.first_attention(qkv, layer.attention, residual)
            else:
                attended = ops.attention(qkv, layer.attention)
            ops.linear_add(attended, layer.output, residual)
            if self._config.norm_first:
                x = ops.norm(residual, layer.mlp_norm)
            else:
                x = ops.norm_in_place(residual, layer.attention_norm)
            ops.linear_add(ops.activated_linear(x, layer.mlp_in), layer.mlp_out, residual)
            if not self._config.norm_first:
                x = ops.norm_in_place(residual, layer.mlp_norm)
        if self._final_norm is not None:
            ops.norm_in_place(residual, self._final_norm)
        if first_tokens is not None:
            first_tokens.spread_first(residual)
        return residual


def relative_biases(buckets: Tensor, max_tokens: int) -> Tensor:
    """[heads, 2 max_tokens - 1]: the bias of each distance of a key from its query, from a table [buckets, heads].

    Half of the buckets are for keys behind the query; of each half one half is exact and the other logarithmic up to
    _MAX_DISTANCE.
    """
    behind = torch.arange(1 - max_tokens, max_tokens)
    half = len(buckets) // 2
    exact = half // 2
    distance = behind.abs()
    steps = torch.log(distance.float() / exact) / math.log(_MAX_DISTANCE / exact) * (half - exact)
    far = (exact + steps.clamp(min=0).long()).clamp(max=half - 1)
    bucket = torch.where(distance < exact, distance, far) + (behind > 0) * half
    return buckets[bucket].T.contiguous()


def relative_places(config: EncoderConfig) -> Tensor:
    """int64 [2 max_context_tokens - 1]: see `RelativePositions.places`. As in transformers' DeBERTa-v2."""
    count = config.max_context_tokens
    before = -torch.arange(1 - count, count)  # tokens that the key is before the query
    span, exact = config.relative_span, config.relative_span // 2
    far = before.abs().clamp(min=exact)
    steps = torch.log(far / exact) / torch.log(torch.tensor((config.farthest - 1) / exact)) * (exact - 1)
    bucket = torch.where(before.abs() <= exact, before, (torch.ceil(steps).long() + exact) * before.sign())
    return (bucket + span).clamp(0, 2 * span - 1)


def _relative(
    config: EncoderConfig, ops: EncoderOps, plain: EncoderLayerWeights, positions: Tensor
) -> RelativePositions:
    """positions [2 span, hidden_size] are projected as the layer's tokens are."""
    weights, bias = plain.qkv.chunk(3), plain.qkv_bias
    biases = (None, None) if bias is None else bias.chunk(3)
    queries, keys = (
        functional.linear(positions, weights[i], biases[i]).view(len(positions), config.num_heads, -1).transpose(0, 1)
        for i in range(2)
    )
    return RelativePositions(ops.vector(keys), ops.vector(queries), relative_places(config))


def _optional(ops: EncoderOps, table: Tensor | None) -> Array | None:
    return None if table is None else ops.table(table)


def _attention(config: EncoderConfig, bias: Array | None, index: int) -> LayerAttention:
    return LayerAttention(config.rope_of_layer(index), config.window_of_layer(index), bias)


def _pack_layer(
    config: EncoderConfig,
    ops: EncoderOps,
    plain: EncoderLayerWeights,
    attention: LayerAttention,
    positions: Tensor | None,
    *,
    int8: bool,
) -> _Layer:
    """positions: the normed table of relative positions."""
    if positions is not None:
        attention = replace(attention, relative=_relative(config, ops, plain, positions))

    def pack(weight: Tensor, bias: Tensor | None, *, is_gated: bool = False) -> Linear:
        return ops.pack_linear(_int8(weight) if int8 else weight, bias, is_gated=is_gated)

    return _Layer(
        attention=attention,
        attention_norm=None if plain.attention_norm is None else ops.vector(plain.attention_norm),
        qkv=pack(plain.qkv, plain.qkv_bias),
        output=pack(plain.output, plain.output_bias),
        mlp_in=pack(plain.mlp_in, plain.mlp_in_bias, is_gated=config.is_gated),
        mlp_out=pack(plain.mlp_out, plain.mlp_out_bias),
        mlp_norm=ops.vector(plain.mlp_norm),
    )


def _int8(weight: Tensor) -> QuantizedWeight:
    outputs, inputs = weight.shape
    try:
        return quantize(torch.split(weight, max(1, BLOCK_VALUES // inputs)), (outputs, inputs), None)
    except UnquantizableError as error:
        raise StartupError(f"--quantize is int8; a linear of the checkpoint {error}") from None
