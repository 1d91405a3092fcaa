"""Groups a step's queries, so that plain torch computes attention for many of them in one call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TileLimits:
    """Limits on the queries of one call."""

    tile_tokens: int = 32
    """Most tokens of a row in one tile."""
    group_scores: int = 1 << 16
    """Most query tokens × key positions in one call, both padded: bounds its memory. One tile is always allowed."""


ONE_BY_ONE = TileLimits(1, 0)
"""Each token in a call of its own: its bits do not depend on the rest of the batch."""


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Query tiles that one call handles: n tiles, w tokens each, k key positions. Padding is masked."""

    tokens: Tensor
    """[n, w] token indices; padding repeats the tile's last token."""
    pages: Tensor
    """[n, p] pages that hold the k keys; padding repeats the tile's first page, never another row's."""
    visible: Tensor
    """[n, 1, w, k] whether a query sees a key."""


class QueryTiles:
    """A step's tiles over the pages of their rows. Groups are made once and used by all layers with the same window."""

    def __init__(
        self,
        rows: NDArray[np.int64],
        positions: NDArray[np.int64],
        ends: NDArray[np.int64],
        tiles: NDArray[np.int64],
        page_table: NDArray[np.int32],
        page_size_tokens: int,
        limits: TileLimits,
        device: torch.device,
    ) -> None:
        """rows, positions and ends (`StepBatch.visible_ends`): [T], one per token. tiles: [n, 2], first token and
        length of each. device: where tensors are made."""
        self._limits = limits
        self._device = device
        self._rows = rows
        self._positions = positions
        self._ends = ends
        self._tiles = tiles
        self._page_table = page_table
        self._page_size_tokens = page_size_tokens
        self._groups: dict[tuple[int | None, bool], list[TileGroup]] = {}

    def single(self, tokens: NDArray[np.int64]) -> QueryTiles:
        """Return the tiles of these tokens only, each a tile of its own."""
        tiles = np.stack([np.arange(len(tokens)), np.ones(len(tokens), np.int64)], axis=1)
        rows, positions, ends = self._rows[tokens], self._positions[tokens], self._ends[tokens]
        table, size = self._page_table, self._page_size_tokens
        return QueryTiles(rows, positions, ends, tiles, table, size, self._limits, self._device)

    def cache_offsets(self) -> tuple[Tensor, Tensor]:
        """The page for each token's key and value, [T], and the offset in that page, [T]."""
        return self._on_device(self._own_pages()), self._on_device(self._positions % self._page_size_tokens)

    def fresh_pages(self) -> Tensor:
        """The pages whose first token is in the step."""
        return self._on_device(self._own_pages()[self._positions % self._page_size_tokens == 0])

    def _own_pages(self) -> NDArray[np.int64]:
        return self._page_table[self._rows, self._positions // self._page_size_tokens].astype(np.int64)

    def _on_device(self, array: NDArray[np.int64] | NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def groups(self, window_tokens: int | None, *, sees_ahead: bool = False) -> list[TileGroup]:
        key = window_tokens, sees_ahead
        if key not in self._groups:
            ends = self._ends if sees_ahead else self._positions + 1
            self._groups[key] = list(self._make_groups(window_tokens, ends))
        return self._groups[key]

    def _make_groups(self, window_tokens: int | None, ends: NDArray[np.int64]) -> Iterator[TileGroup]:
        for is_single in (True, False):
            tiles = self._tiles[(self._tiles[:, 1] == 1) == is_single]
            width_used = int(tiles[:, 1].max(initial=1))
            first_positions = self._positions[tiles[:, 0]]
            first_pages = np.zeros_like(first_positions)
            if window_tokens is not None:
                first_pages = np.maximum(first_positions - window_tokens + 1, 0) // self._page_size_tokens
            num_pages = (ends[tiles.sum(axis=1) - 1] - 1) // self._page_size_tokens + 1 - first_pages
            order = np.argsort(num_pages, kind="stable")
            while len(order):
                scores = (np.arange(len(order)) + 1) * width_used * num_pages[order] * self._page_size_tokens
                count = max(1, int(np.searchsorted(scores, self._limits.group_scores, side="right")))
                chosen, order = order[:count], order[count:]
                most = int(num_pages[chosen].max())
                yield self._make_group(tiles[chosen], first_pages[chosen], most, window_tokens, ends)

    def _make_group(
        self,
        tiles: NDArray[np.int64],
        first_pages: NDArray[np.int64],
        num_pages: int,
        window_tokens: int | None,
        all_ends: NDArray[np.int64],
    ) -> TileGroup:
        size = self._page_size_tokens
        width = int(tiles[:, 1].max())
        tokens = tiles[:, :1] + np.minimum(np.arange(width), tiles[:, 1:] - 1)
        positions, ends = self._positions[tokens], all_ends[tokens]
        pages = first_pages[:, None] + np.arange(num_pages)
        owned = np.where(pages <= (ends[:, -1:] - 1) // size, pages, first_pages[:, None])
        keys = first_pages[:, None] * size + np.arange(num_pages * size)
        visible = keys[:, None, :] < ends[:, :, None]
        if window_tokens is not None:
            visible &= keys[:, None, :] > positions[:, :, None] - window_tokens
        return TileGroup(
            tokens=self._on_device(tokens),
            pages=self._on_device(self._page_table[self._rows[tiles[:, :1]], owned].astype(np.int64)),
            visible=self._on_device(visible)[:, None],
        )


def cut_rows(query_starts: NDArray[np.int32], tile_tokens: int) -> NDArray[np.int64]:
    """Cut each row into tiles of at most tile_tokens: [n, 2], first token and length."""
    lengths = np.diff(query_starts).astype(np.int64)
    counts = -(-lengths // tile_tokens)
    piece = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = piece * tile_tokens
    starts = np.repeat(query_starts[:-1].astype(np.int64), counts) + offsets
    return np.stack([starts, np.minimum(np.repeat(lengths, counts) - offsets, tile_tokens)], axis=1)
