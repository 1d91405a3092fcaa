"""Cuts long contexts of prefill attention into segments at fixed positions; see kernels/prefill/prefill_segments.cuh.

A block goes through all segments of its tile of queries, or a few tiles have a block for each segment so that they fill
the device. A row's bits are the same either way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.backend.passes.cuda.attention.kernel_limits import (
    ENOUGH_BLOCKS,
    MAX_CONTEXT_TOKENS,
    segment_starts,
)

_WHOLE = -1
"""Replaces a segment's first position: the tile's block goes through all segments."""

SEGMENT_STARTS = np.array(segment_starts())
"""The first positions of all segments."""


@dataclass(frozen=True, slots=True)
class PrefillWorkspace:
    """Results of segments, in fp32. Lives as long as the model; one launch at a time uses it."""

    merged_sums: Tensor
    """[max_tokens, num_heads, head_dim]."""
    merged_peaks: Tensor
    """[max_tokens, num_heads, 2]."""
    part_sums: Tensor
    """[max_parts, num_kv_heads, rows of a tile, head_dim]."""
    part_peaks: Tensor
    """[max_parts, num_kv_heads, rows of a tile, 2]."""
    tickets: Tensor
    """int32 [1 + max_parts * num_kv_heads]: counters, 0 between launches. With wgmma the first counts tasks, and the
    others finished segments of each tile and head; else segments are counted from the first on."""


class WorkspaceSizes(NamedTuple):
    """Sizes of a workspace; max_tokens and max_parts are 0 if no context has more than one segment."""

    max_tokens: int
    max_parts: int
    num_heads: int
    num_kv_heads: int
    tile_rows: int
    head_dim: int

    def make(self, device: str | torch.device) -> PrefillWorkspace:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        part_rows = self.max_parts, self.num_kv_heads, self.tile_rows
        return PrefillWorkspace(
            merged_sums=zeros(self.max_tokens, self.num_heads, self.head_dim),
            merged_peaks=zeros(self.max_tokens, self.num_heads, 2),
            part_sums=zeros(*part_rows, self.head_dim),
            part_peaks=zeros(*part_rows, 2),
            tickets=zeros(1 + self.max_parts * self.num_kv_heads, dtype=torch.int32),
        )

    @property
    def num_bytes(self) -> int:
        parts = self.max_parts * self.num_kv_heads
        rows = self.max_tokens * self.num_heads + parts * self.tile_rows
        return 4 * (rows * (self.head_dim + 2) + 1 + parts)


def max_parts(num_kv_heads: int) -> int:
    """Return how many segments of a step may have a block of their own."""
    return -(-ENOUGH_BLOCKS // num_kv_heads)


def whole_tiles(tiles: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return tiles [n, 2] as [n, 4], each with one block for all its segments."""
    return np.column_stack([tiles, np.full(len(tiles), _WHOLE, np.int32), np.zeros(len(tiles), np.int32)])


def cut_segments(tiles: NDArray[np.int32], last_positions: NDArray[np.int64], num_kv_heads: int) -> NDArray[np.int32]:
    """Return blocks [m, 4] for tiles [n, 2], those with the most keys first.

    A block is a tile's two numbers, the first position of the block's segment or -1 for all, and a slot of the
    workspace; a tile's slots follow each other. last_positions are those of each tile's last query, descending.
    """
    if len(tiles) * num_kv_heads >= ENOUGH_BLOCKS:
        return whole_tiles(tiles)
    num_segments = np.searchsorted(SEGMENT_STARTS, last_positions, side="right")
    ends = np.cumsum(num_segments)
    num_cut = int(((num_segments > 1) & (ends <= max_parts(num_kv_heads))).sum())  # the first ones
    counts = num_segments[:num_cut]
    slots = np.arange(counts.sum())
    segments = slots - np.repeat(ends[:num_cut] - counts, counts)
    starts = SEGMENT_STARTS[segments]
    parts = np.column_stack([np.repeat(tiles[:num_cut], counts, axis=0), starts, slots]).astype(np.int32)
    after = np.append(SEGMENT_STARTS[1:], MAX_CONTEXT_TOKENS)[segments]
    part_tokens = np.minimum(after, np.repeat(last_positions[:num_cut], counts) + 1) - starts
    num_tokens = np.concatenate([part_tokens, last_positions[num_cut:] + 1])
    blocks = np.concatenate([parts, whole_tiles(tiles[num_cut:])])
    return np.ascontiguousarray(blocks[np.argsort(-num_tokens, kind="stable")])
