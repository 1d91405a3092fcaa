"""The decoder's operations in plain torch: the reference for every other implementation, and the CPU's fallback.

Products run on prepacked weights; attention gathers the keys and values that a group of query tiles sees and computes
it in fp32. All that a step's rows have in common for every layer is prepared once, in `TorchStep`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from backend.passes.decoder.linears import PackedLinear
from backend.passes.decoder.rope import RopeTable

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from backend.forward_pass import StepBatch
    from backend.passes.decoder.config import RopeConfig
    from backend.passes.decoder.ops import AttentionLayer, HeadShape

KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

_TILE_TOKENS = 32
_MAX_GROUP_SCORES = 1 << 16
"""Query tokens × key positions, both padded, that one attention call handles: bounds its memory."""


@dataclass(frozen=True, slots=True)
class _TileGroup:
    """Query tiles of one width that attend together: n tiles, w tokens each, k key positions; padding is masked."""

    tokens: Tensor
    """[n, w] token indices; padding repeats the tile's last token."""
    cache_slots: Tensor
    """[n, k] places in the cache; padding repeats the tile's first, so that nothing unowned is read."""
    visible: Tensor
    """[n, 1, 1, w, k] whether a query sees a key."""


class TorchStep:
    """One step's rows as tensors."""

    def __init__(
        self, batch: StepBatch, input_ids: NDArray[np.int32], page_size_tokens: int, rope_rows: Tensor
    ) -> None:
        lengths = np.diff(batch.query_starts)
        rows = np.repeat(np.arange(batch.num_rows), lengths)
        positions = np.arange(batch.num_tokens) - np.repeat(batch.query_starts[:-1] - batch.context_lens, lengths)
        pages = batch.page_table[rows, positions // page_size_tokens].astype(np.int64)
        self.input_ids = torch.from_numpy(input_ids.astype(np.int64))
        self.cache_slots = torch.from_numpy(pages * page_size_tokens + positions % page_size_tokens)
        cos_sin = rope_rows[torch.from_numpy(positions)].unsqueeze(1)
        self.cos, self.sin = cos_sin.chunk(2, dim=-1)
        self.last_tokens = torch.from_numpy(batch.query_starts[1:][batch.logit_rows].astype(np.int64) - 1)
        self._positions = positions
        self._page_table = batch.page_table
        self._page_size_tokens = page_size_tokens
        self._rows = rows
        self._tiles = _query_tiles(batch.query_starts)
        self._groups: dict[int | None, list[_TileGroup]] = {}

    def narrowed(self) -> TorchStep | None:
        """This step with the last tokens only; None where there are none."""
        if not len(self.last_tokens):
            return None
        last = self.last_tokens.numpy()
        step = object.__new__(TorchStep)
        step._positions = self._positions[last]
        step._page_table = self._page_table
        step._page_size_tokens = self._page_size_tokens
        step._rows = self._rows[last]
        step._tiles = np.stack([np.arange(len(last)), np.ones(len(last), np.int64)], axis=1)
        step._groups = {}
        return step

    def tile_groups(self, window_tokens: int | None) -> list[_TileGroup]:
        if window_tokens not in self._groups:
            self._groups[window_tokens] = list(self._make_groups(window_tokens))
        return self._groups[window_tokens]

    def _make_groups(self, window_tokens: int | None) -> Iterator[_TileGroup]:
        for width in (1, _TILE_TOKENS):
            tiles = self._tiles[(self._tiles[:, 1] == 1) == (width == 1)]
            width_used = int(tiles[:, 1].max(initial=1))
            first_positions = self._positions[tiles[:, 0]]
            key_starts = np.zeros_like(first_positions)
            if window_tokens is not None:
                key_starts = np.maximum(first_positions - window_tokens + 1, 0)
            num_keys = first_positions + tiles[:, 1] - key_starts
            order = np.argsort(num_keys, kind="stable")
            while len(order):
                fitting = (np.arange(len(order)) + 1) * width_used * num_keys[order] <= _MAX_GROUP_SCORES
                count = max(1, int(np.argmin(fitting)) if not fitting.all() else len(order))
                chosen, order = order[:count], order[count:]
                yield self._make_group(tiles[chosen], key_starts[chosen], int(num_keys[chosen].max()), window_tokens)

    def _make_group(
        self, tiles: NDArray[np.int64], key_starts: NDArray[np.int64], num_keys: int, window_tokens: int | None
    ) -> _TileGroup:
        width = int(tiles[:, 1].max())
        tokens = tiles[:, :1] + np.minimum(np.arange(width), tiles[:, 1:] - 1)
        positions = self._positions[tokens]
        keys = key_starts[:, None] + np.arange(num_keys)
        keys_read = np.where(keys <= positions[:, -1:], keys, key_starts[:, None])
        pages = self._page_table[self._rows[tiles[:, :1]], keys_read // self._page_size_tokens].astype(np.int64)
        visible = keys[:, None, :] <= positions[:, :, None]
        if window_tokens is not None:
            visible &= keys[:, None, :] > positions[:, :, None] - window_tokens
        return _TileGroup(
            tokens=torch.from_numpy(tokens),
            cache_slots=torch.from_numpy(pages * self._page_size_tokens + keys_read % self._page_size_tokens),
            visible=torch.from_numpy(visible)[:, None, None],
        )


def _query_tiles(query_starts: NDArray[np.int32]) -> NDArray[np.int64]:
    """[n, 2] first token and length of pieces of at most _TILE_TOKENS, none across rows."""
    lengths = np.diff(query_starts).astype(np.int64)
    counts = -(-lengths // _TILE_TOKENS)
    piece = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = piece * _TILE_TOKENS
    starts = np.repeat(query_starts[:-1].astype(np.int64), counts) + offsets
    return np.stack([starts, np.minimum(np.repeat(lengths, counts) - offsets, _TILE_TOKENS)], axis=1)


class TorchOps:
    """See `Ops`. dtype is the weights' and activations': torch.float32 or torch.bfloat16."""

    def __init__(self, heads: HeadShape, rope: RopeConfig, rms_norm_eps: float, dtype: torch.dtype) -> None:
        self._heads = heads
        self._rope_table = RopeTable(rope)
        self._rotary_dim = rope.rotary_dim
        self._eps = rms_norm_eps
        self._dtype = dtype
        self._page_size_tokens = 0
        self.keys: list[Tensor] = []
        """Of each layer, [num_pages * page_size, num_kv_heads, head_dim]."""
        self.values: list[Tensor] = []

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return PackedLinear.pack(weight.to(self._dtype), None if bias is None else bias.to(self._dtype))

    def vector(self, weight: Tensor) -> Tensor:
        return weight.float()

    def table(self, weight: Tensor) -> Tensor:
        return weight.to(self._dtype)

    def create_cache(self, num_layers: int, num_pages: int, page_size_tokens: int, kv_dtype: str) -> None:
        self._page_size_tokens = page_size_tokens
        shape = (num_pages * page_size_tokens, self._heads.num_kv_heads, self._heads.head_dim)
        self.keys = [torch.zeros(shape, dtype=KV_DTYPES[kv_dtype]) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=KV_DTYPES[kv_dtype]) for _ in range(num_layers)]

    def begin_step(self, batch: StepBatch, input_ids: NDArray[np.int32]) -> TorchStep:
        positions_end = int((batch.context_lens + np.diff(batch.query_starts)).max())
        return TorchStep(batch, input_ids, self._page_size_tokens, self._rope_table.cover(positions_end))

    def embed(self, table: Tensor, step: TorchStep) -> Tensor:
        return functional.embedding(step.input_ids, table).float()

    def rms_norm(self, residual: Tensor, weight: Tensor) -> Tensor:
        return self._norm(residual, weight).to(self._dtype)

    def add_rms_norm(self, delta: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return self._norm(residual.add_(delta), weight).to(self._dtype)

    def linear(self, x: Tensor, weights: PackedLinear) -> Tensor:
        return weights(x)

    def rotate_and_store(self, qkv: Tensor, step: TorchStep, layer: AttentionLayer) -> None:
        heads = qkv.view(len(qkv), -1, self._heads.head_dim)
        num_heads, num_kv_heads = self._heads.num_heads, self._heads.num_kv_heads
        parts = ((heads[:, :num_heads], layer.q_norm), (heads[:, num_heads:-num_kv_heads], layer.k_norm))
        for part, norm in parts:
            if norm is not None:
                part.copy_(self._norm(part.float(), norm))
            if layer.uses_rope:
                x, y = part[..., : self._rotary_dim].float().chunk(2, dim=-1)
                rotated = torch.cat([x * step.cos - y * step.sin, y * step.cos + x * step.sin], dim=-1)
                part[..., : self._rotary_dim] = rotated
        self.keys[layer.index][step.cache_slots] = heads[:, num_heads:-num_kv_heads].to(self.keys[0].dtype)
        self.values[layer.index][step.cache_slots] = heads[:, -num_kv_heads:].to(self.values[0].dtype)

    def attention(self, qkv: Tensor, step: TorchStep, layer: AttentionLayer) -> Tensor:
        shape = self._heads
        queries = qkv[:, : shape.output_size].view(len(qkv), shape.num_kv_heads, -1, shape.head_dim)
        output = torch.empty(len(qkv), shape.num_kv_heads, queries.shape[2], shape.head_dim, dtype=self._dtype)
        for group in step.tile_groups(layer.window_tokens):
            q = queries[group.tokens].float().permute(0, 2, 3, 1, 4)
            k = self.keys[layer.index][group.cache_slots].float().permute(0, 2, 3, 1).unsqueeze(2)
            v = self.values[layer.index][group.cache_slots].float().transpose(1, 2).unsqueeze(2)
            scores = torch.matmul(q, k).mul_(shape.head_dim**-0.5).masked_fill_(~group.visible, -torch.inf)
            attended = torch.matmul(torch.softmax(scores, dim=-1), v)
            output[group.tokens] = attended.permute(0, 3, 1, 2, 4).to(self._dtype)
        return output.view(len(qkv), shape.output_size)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return functional.silu(gate).mul_(up).to(self._dtype)

    def last_tokens(self, step: TorchStep) -> TorchStep | None:
        return step.narrowed()

    def take_last_tokens(self, x: Tensor, step: TorchStep) -> Tensor:
        return x[step.last_tokens]

    def close(self) -> None:
        self.keys, self.values = [], []

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self._eps) * weight
