"""The encoder's operations in plain torch: the reference, and the fallback without the native kernels.

Rows are computed one by one, so a row's bits cannot depend on the others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from penstock.backend.checkpoint.encoders.encoder_config import Activation, EncoderConfig
from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
from penstock.backend.passes.cpu.in_torch.torch_linear import PackedLinear
from penstock.backend.passes.cpu.in_torch.torch_quantized_linear import QuantizedLinear
from penstock.backend.passes.encoder.host_vectors import HostVectors
from penstock.backend.passes.encoder.ops import EmbeddingTables, Encode, EncoderRows, LayerAttention
from penstock.backend.passes.ops.rope_table import RopeTable

TorchLinear: TypeAlias = PackedLinear | QuantizedLinear

_QUERY_BLOCK = 256
"""Queries whose scores are in memory at a time."""


class TorchEncoderOps(HostVectors):
    """Implements `EncoderOps`. dtype is that of weights and activations: float32 or bfloat16."""

    group_tokens = 0

    def __init__(self, config: EncoderConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype
        self._rope_table = RopeTable(*config.ropes)
        self._ids = self._types = torch.empty(0, dtype=torch.int64)

    def pack_linear(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, *, is_gated: bool = False
    ) -> TorchLinear:
        if not isinstance(weight, Tensor):
            return QuantizedLinear(weight, None if bias is None else bias.float(), 1.0, is_gated)
        packed = PackedLinear.pack(weight.to(self._dtype), None if bias is None else bias.to(self._dtype))
        return replace(packed, is_gated=is_gated)

    def vector(self, weight: Tensor) -> Tensor:
        return weight.float()

    def table(self, weight: Tensor) -> Tensor:
        return weight.to(self._dtype)

    @torch.inference_mode()
    def run(self, rows: EncoderRows, encode: Encode) -> NDArray[np.float32]:
        """Encode a step of one row."""
        self._ids = torch.from_numpy(rows.input_ids.astype(np.int64))
        self._types = torch.from_numpy(rows.token_types.astype(np.int64))
        hidden: NDArray[np.float32] = encode(None).numpy()
        return hidden

    def embed(self, tables: EmbeddingTables) -> Tensor:
        residual = functional.embedding(self._ids, tables.words).float()
        if tables.positions is not None:
            first = self._config.first_position
            residual += tables.positions[first : first + len(self._ids)]
        if tables.token_types is not None:
            residual += functional.embedding(self._types, tables.token_types)
        return residual

    def norm(self, residual: Tensor, weight: Tensor | None) -> Tensor:
        return (residual if weight is None else self._normed(residual, weight)).to(self._dtype)

    def norm_in_place(self, residual: Tensor, weight: Tensor) -> Tensor:
        return residual.copy_(self._normed(residual, weight)).to(self._dtype)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        scale, bias = weight.chunk(2)
        normed: Tensor = functional.layer_norm(x, (x.shape[-1],), scale, bias, self._config.norm_eps)
        return normed

    def linear(self, x: Tensor, weights: TorchLinear) -> Tensor:
        return weights(x).to(self._dtype)

    def linear_add(self, x: Tensor, weights: TorchLinear, residual: Tensor) -> None:
        residual.add_(weights(x))

    def activated_linear(self, x: Tensor, weights: TorchLinear) -> Tensor:
        product = weights(x).float()
        if not weights.is_gated:
            return _activate(product, self._config.activation).to(self._dtype)
        gate, up = product.chunk(2, dim=-1)
        return (_activate(gate, self._config.activation) * up).to(self._dtype)

    def attention(self, qkv: Tensor, layer: LayerAttention) -> Tensor:
        count, heads, dim = len(qkv), self._config.num_heads, self._config.head_dim
        q, k, v = qkv.view(count, 3, heads, dim).float().permute(1, 2, 0, 3)
        if layer.rope is not None:
            rows = torch.from_numpy(self._rope_table.cover(count)[:count])
            turns = rows.view(count, -1, 2, dim // 2)[:, layer.rope]
            q, k = (self._rotated(x, turns) for x in (q, k))
        by_place = None if layer.relative is None else k @ layer.relative.queries.transpose(1, 2)
        attended = [self._attend(q, k, v, first, layer, by_place) for first in range(0, count, _QUERY_BLOCK)]
        return torch.cat(attended, dim=1).transpose(0, 1).reshape(count, heads * dim).to(self._dtype)

    def _rotated(self, x: Tensor, turns: Tensor) -> Tensor:
        """x [heads, n, head_dim], turns [n, 2, head_dim / 2]; rounded as the other implementations store them."""
        cos, sin = turns.unbind(1)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(self._dtype).float()

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, first: int, layer: LayerAttention, by_place: Tensor | None
    ) -> Tensor:
        """Return what the queries from `first` on attend to, [heads, queries, head_dim].

        by_place: each key times `RelativePositions.queries`, [heads, keys, 2 span].
        """
        queries = q[:, first : first + _QUERY_BLOCK]
        scores = queries @ k.transpose(1, 2) * self._config.score_scale
        places = torch.arange(k.shape[1])
        distance = places - places[first : first + _QUERY_BLOCK, None]
        if layer.relative is not None and by_place is not None:
            rows = layer.relative.places[distance + len(layer.relative.places) // 2]
            of_queries = (queries @ layer.relative.keys.transpose(1, 2)).gather(2, rows.expand(len(q), -1, -1))
            of_keys = by_place.gather(2, rows.T.expand(len(q), -1, -1)).transpose(1, 2)
            scores += (of_queries + of_keys) * self._config.score_scale
        if layer.relative_bias is not None:
            scores += layer.relative_bias[:, distance + layer.relative_bias.shape[1] // 2]
        if layer.window is not None:
            scores.masked_fill_(distance.abs() > layer.window, -torch.inf)
        attended: Tensor = scores.softmax(dim=-1) @ v
        return attended

    @torch.inference_mode()
    def dense(self, x: NDArray[np.float32], weights: TorchLinear, activation: Activation) -> NDArray[np.float32]:
        product: NDArray[np.float32] = _activate(
            weights(torch.from_numpy(x).to(self._dtype)).float(), activation
        ).numpy()
        return product

    @torch.inference_mode()
    def dense_norm(self, x: NDArray[np.float32], weight: Tensor) -> NDArray[np.float32]:
        normed: NDArray[np.float32] = self._normed(torch.from_numpy(x), weight).numpy()
        return normed

    def close(self) -> None:
        """Nothing to release."""


def _activate(x: Tensor, activation: Activation) -> Tensor:
    match activation:
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "relu":
            return torch.relu(x)
        case "silu":
            return functional.silu(x)
        case "tanh":
            return torch.tanh(x)
        case "sigmoid":
            return torch.sigmoid(x)
        case "identity":
            return x
