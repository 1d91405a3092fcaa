"""The paged KV cache of all layers, and a step's way through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.backend.passes.decoder.cpu.torch_kv_cache import KvPages, make_kv_pages
from penstock.backend.passes.decoder.cpu.torch_query_tiles import QueryTiles, TileLimits, cut_rows
from penstock.backend.passes.transformers_model.attention import attend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from penstock.backend.forward_pass import StepBatch
    from penstock.backend.passes.transformers_model.attention import LayerCall

_LIMITS = TileLimits()


@dataclass(frozen=True, slots=True)
class KvShape:
    """Keys and values of one token in one layer."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_values(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


class PagedCache:
    """One `KvPages` for the keys and one for the values of each layer."""

    def __init__(self, shapes: Sequence[KvShape], num_pages: int, page_size_tokens: int, kv_dtype: str) -> None:
        self._page_size_tokens = page_size_tokens
        outer = (num_pages, page_size_tokens)
        self.keys = [make_kv_pages((shape.kv_heads, *outer, shape.key_dim), kv_dtype) for shape in shapes]
        self.values = [make_kv_pages((shape.kv_heads, *outer, shape.value_dim), kv_dtype) for shape in shapes]

    def begin_step(self, batch: StepBatch) -> PagedStep:
        """Copy batch.page_copies, and prepare the rows."""
        size = self._page_size_tokens
        # Only the tokens that a row will see are copied; the rest of a page might hold NaN.
        contexts = enumerate(batch.context_lens.tolist())
        num_seen = {int(batch.page_table[row, context // size]): context % size for row, context in contexts}
        for source, destination in batch.page_copies:
            for cached in (*self.keys, *self.values):
                cached.copy(source, destination, num_seen.get(destination, size))
        lengths = np.diff(batch.query_starts)
        rows = np.repeat(np.arange(batch.num_rows), lengths)
        positions = np.arange(batch.num_tokens) - np.repeat(batch.query_starts[:-1] - batch.context_lens, lengths)
        tiles = cut_rows(batch.query_starts, _LIMITS.tile_tokens)
        queries = QueryTiles(rows, positions, tiles, batch.page_table, size, _LIMITS)
        pages, offsets = queries.cache_offsets()
        return PagedStep(self, torch.from_numpy(positions), queries, pages, offsets)


class PagedStep:
    """One step's `Attention`: stores a layer's keys and values, and attends through the page table."""

    def __init__(
        self, cache: PagedCache, positions: Tensor, queries: QueryTiles, pages: Tensor, offsets: Tensor
    ) -> None:
        """positions, pages and offsets: [T], those of each token."""
        self.positions = positions
        self._cache = cache
        self._queries = queries
        self._pages = pages
        self._offsets = offsets
        self._fresh_pages = pages[offsets == 0]

    def __call__(self, call: LayerCall) -> Tensor:
        keys, values = self._cache.keys[call.layer], self._cache.values[call.layer]
        # Attention gives positions without a token the weight 0; a NaN left there would survive that.
        values.clear(self._fresh_pages)
        keys.write(self._pages, self._offsets, call.keys)
        values.write(self._pages, self._offsets, call.values)
        output = torch.empty(*call.queries.shape[:2], call.values.shape[2], dtype=call.queries.dtype)
        for group in self._queries.groups(call.window_tokens):
            cached_keys, cached_values = (_flat(pages, group.pages) for pages in (keys, values))
            visible = group.visible[:, 0]
            output[group.tokens] = attend(call, call.queries[group.tokens], cached_keys, cached_values, visible).to(
                output.dtype
            )
        return output


def _flat(cache: KvPages, pages: Tensor) -> Tensor:
    """The tokens of pages [n, p] in order: [kv_heads, n, p · page_size, dim] fp32."""
    return cache.read(pages).flatten(2, 3)
