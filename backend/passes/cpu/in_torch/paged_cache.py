"""The paged KV cache of all layers in plain torch, and a step's use of it: store, then attend.

Pages have one of several KV dtypes. A page of all layers is copied to bytes for memory that outlives the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.backend.forward_pass import StepBatch
from penstock.backend.passes.cpu.in_torch.query_tiles import QueryTiles, TileLimits, cut_rows
from penstock.backend.passes.ops.interface import KV_BLOCK_VALUES

_MAX = 127.0
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


class KvPages(Protocol):
    """The keys, or the values, of one layer: [num_kv_heads, num_pages, page_size, head_dim]."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All memory of this cache."""

    def write(self, pages: Tensor, offsets: Tensor, heads: Tensor) -> None:
        """Store heads [T, num_kv_heads, head_dim]; token t goes to offset offsets[t] of page pages[t]."""

    def clear(self, pages: Tensor) -> None:
        """Zero these pages."""

    def copy(self, source: int, destination: int, num_tokens: int) -> None:
        """Copy the first num_tokens of a page to another, and zero the rest of that page."""

    def read(self, pages: Tensor) -> Tensor:
        """[num_kv_heads, *pages.shape, page_size, head_dim] fp32."""


class _Pages:
    """The part that does not depend on the storage format."""

    tensors: tuple[Tensor, ...]

    def clear(self, pages: Tensor) -> None:
        for tensor in self.tensors:
            tensor[:, pages] = 0

    def copy(self, source: int, destination: int, num_tokens: int) -> None:
        for tensor in self.tensors:
            tensor[:, destination, num_tokens:] = 0
            tensor[:, destination, :num_tokens] = tensor[:, source, :num_tokens]


class FloatKvPages(_Pages):
    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.numbers = torch.zeros(shape, dtype=dtype, device=device)
        self.tensors = (self.numbers,)

    def write(self, pages: Tensor, offsets: Tensor, heads: Tensor) -> None:
        self.numbers[:, pages, offsets] = heads.transpose(0, 1).to(self.numbers.dtype)

    def read(self, pages: Tensor) -> Tensor:
        return self.numbers[:, pages].float()


class Q8KvPages(_Pages):
    """Blocks of 32 values of a head that share a scale."""

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device) -> None:
        *outer, head_dim = shape
        blocks = (*outer, head_dim // KV_BLOCK_VALUES)
        self.numbers = torch.zeros(*blocks, KV_BLOCK_VALUES, dtype=torch.int8, device=device)
        self.scales = torch.zeros(*blocks, 1, dtype=torch.float16, device=device)
        self.tensors = (self.numbers, self.scales)

    def write(self, pages: Tensor, offsets: Tensor, heads: Tensor) -> None:
        numbers, scales = quantise_q8_0(heads.transpose(0, 1))
        self.numbers[:, pages, offsets] = numbers
        self.scales[:, pages, offsets] = scales

    def read(self, pages: Tensor) -> Tensor:
        return (self.numbers[:, pages] * self.scales[:, pages].float()).flatten(-2)


def make_kv_pages(shape: tuple[int, int, int, int], kv_dtype: str, device: torch.device) -> KvPages:
    """shape: [num_kv_heads, num_pages, page_size, head_dim]."""
    if kv_dtype == "q8_0":
        return Q8KvPages(shape, device)
    return FloatKvPages(shape, {"fp32": torch.float32, "bf16": torch.bfloat16}[kv_dtype], device)


def quantise_q8_0(x: Tensor) -> tuple[Tensor, Tensor]:
    """Convert x [..., head_dim] to int8 [..., head_dim / 32, 32] and binary16 scales [..., head_dim / 32, 1].

    As GGML's q8_0: the scale is d = largest |x| / 127; numbers are x / d rounded to the nearest integer, ties away from
    zero; only then is d rounded to binary16. A block with a value that is not finite gets the scale NaN.
    """
    blocks = x.float().reshape(*x.shape[:-1], -1, KV_BLOCK_VALUES)
    scales = blocks.abs().amax(dim=-1, keepdim=True) / _MAX
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    scaled = blocks * torch.where(scales >= _SMALLEST_NORMAL, 1 / scales, 0.0)
    whole = scaled.trunc()
    numbers = whole + ((scaled - whole) * 2).trunc()
    return numbers.nan_to_num(0.0).to(torch.int8), scales.half()


@dataclass(frozen=True, slots=True)
class KvShape:
    """Keys and values of one token in one layer."""

    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_values(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """Changes to the scores of a layer before their softmax."""

    scale: float
    softcap: float | None = None
    """Scores become softcap · tanh(scores / softcap)."""
    sinks: Tensor | None = None
    """[heads] a score for each head that takes part in the softmax and has no value (gpt-oss)."""


class PagedCache:
    """One `KvPages` for the keys and one for the values of each layer."""

    def __init__(
        self,
        shapes: Sequence[KvShape],
        num_pages: int,
        page_size_tokens: int,
        kv_dtype: str,
        limits: TileLimits = TileLimits(),  # noqa: B008 - frozen
        device: torch.device = torch.device("cpu"),  # noqa: B008 - a value
    ) -> None:
        self._device = device
        self._page_size_tokens = page_size_tokens
        self._limits = limits
        outer = (num_pages, page_size_tokens)
        self.keys = [make_kv_pages((shape.kv_heads, *outer, shape.key_dim), kv_dtype, device) for shape in shapes]
        self.values = [make_kv_pages((shape.kv_heads, *outer, shape.value_dim), kv_dtype, device) for shape in shapes]

    def begin_step(self, batch: StepBatch) -> list[PagedStep]:
        """Copy batch.page_copies, and prepare the rows for each group of layers."""
        self._copy_pages(batch)
        lengths = np.diff(batch.query_starts)
        rows = np.repeat(np.arange(batch.num_rows), lengths)
        positions = np.arange(batch.num_tokens) - np.repeat(batch.query_starts[:-1] - batch.context_lens, lengths)
        tiles = cut_rows(batch.query_starts, self._limits.tile_tokens)
        table, size = batch.page_table, self._page_size_tokens
        tables = [table] if table.ndim == 2 else [table[:, :, group] for group in range(table.shape[2])]
        ends = positions + 1 if batch.visible_ends is None else batch.visible_ends.astype(np.int64)
        queries = [QueryTiles(rows, positions, ends, tiles, own, size, self._limits, self._device) for own in tables]
        on_device = torch.from_numpy(positions).to(self._device)
        return [PagedStep(self, on_device, own) for own in queries]

    def parts(self, page: int) -> list[Tensor]:
        """All memory of a page."""
        return [tensor[:, page] for heads in (*self.keys, *self.values) for tensor in heads.tensors]

    def save(self, page: int, content: NDArray[np.uint8]) -> None:
        end = 0
        for part in self.parts(page):
            found = part.contiguous().view(torch.uint8).flatten().numpy()
            start, end = end, end + len(found)
            content[start:end] = found

    def restore(self, page: int, content: NDArray[np.uint8]) -> None:
        end = 0
        for part in self.parts(page):
            start, end = end, end + part.numel() * part.element_size()
            there = torch.from_numpy(content[start:end])
            if part.dtype is not torch.uint8:
                there = there.clone().view(part.dtype)  # aligned to its numbers
            part.copy_(there.view(part.shape))

    def _copy_pages(self, batch: StepBatch) -> None:
        """Copy only the tokens that a row will see; the rest of a page might hold NaN."""
        if not batch.page_copies:
            return
        batch.check_page_moves()
        size = self._page_size_tokens
        contexts = enumerate(batch.context_lens.tolist())
        num_seen = {int(batch.page_table[row, context // size]): context % size for row, context in contexts}
        for source, destination in batch.page_copies:
            for heads in (*self.keys, *self.values):
                heads.copy(source, destination, num_seen.get(destination, size))


class PagedStep:
    """One step's tokens in the cache."""

    def __init__(self, cache: PagedCache, positions: Tensor, queries: QueryTiles) -> None:
        """positions [T] are the tokens' positions in their sequences. queries are the step's tiles."""
        self.positions = positions
        self._cache = cache
        self._queries = queries
        self._pages, self._offsets = queries.cache_offsets()
        self._fresh_pages = queries.fresh_pages()

    def single(self, tokens: NDArray[np.int64]) -> PagedStep:
        """Return the step for these tokens only: `attend` takes their queries."""
        return PagedStep(self._cache, self.positions[torch.from_numpy(tokens)], self._queries.single(tokens))

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the keys and values of all tokens, [T, kv_heads, dim]."""
        cached_keys, cached_values = self._cache.keys[layer], self._cache.values[layer]
        # Attention gives positions without a token the weight 0; a NaN left there would survive that.
        cached_values.clear(self._fresh_pages)
        cached_keys.write(self._pages, self._offsets, keys)
        cached_values.write(self._pages, self._offsets, values)

    def attend(
        self, layer: int, queries: Tensor, window_tokens: int | None, rule: ScoreRule, *, sees_ahead: bool = False
    ) -> Tensor:
        """Causal attention of queries [T, heads, key_dim] through the page table: [T, heads, value_dim], same dtype."""
        groups = self._queries.groups(window_tokens, sees_ahead=sees_ahead)
        output = None
        for group in groups:
            keys, values = (_flat(pages[layer], group.pages) for pages in (self._cache.keys, self._cache.values))
            attended = attend(queries[group.tokens], keys, values, group.visible[:, 0], rule)
            if output is None:
                output = torch.empty(*queries.shape[:2], attended.shape[-1], dtype=queries.dtype, device=queries.device)
            output[group.tokens] = attended.to(queries.dtype)
        if output is None:
            raise ValueError("a step without tokens cannot attend")
        return output


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, rule: ScoreRule) -> Tensor:
    """Attention of n groups of w queries, each over K keys of its own: [n, w, heads, value_dim] fp32.

    queries [n, w, heads, key_dim]; keys [kv_heads, n, K, key_dim] and values [kv_heads, n, K, value_dim], fp32; visible
    [n, w, K] says which key a query sees.
    """
    kv_heads, (num, width, heads, key_dim) = keys.shape[0], queries.shape
    group = heads // kv_heads
    q = queries.float().view(num, width, kv_heads, group, key_dim).permute(2, 0, 3, 1, 4)
    scores = torch.matmul(q.reshape(kv_heads, num, group * width, key_dim), keys.transpose(2, 3)).mul_(rule.scale)
    if rule.softcap is not None:
        scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    scores = scores.view(kv_heads, num, group, width, -1).masked_fill_(~visible[:, None], -torch.inf)
    if rule.sinks is not None:
        sinks = rule.sinks.float().view(kv_heads, 1, group, 1, 1).expand(*scores.shape[:4], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]].flatten(2, 3)
    attended = torch.matmul(weights, values).view(kv_heads, num, group, width, -1)
    return attended.permute(1, 3, 0, 2, 4).reshape(num, width, heads, -1)


def _flat(cache: KvPages, pages: Tensor) -> Tensor:
    """The tokens of pages [n, p] in order: [kv_heads, n, p · page_size, dim] fp32."""
    return cache.read(pages).flatten(2, 3)
