"""Rows of a step, their sequences in a paged cache that is NaN elsewhere, and the expected attention in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from penstock.backend.passes.cpu.in_torch.paged_cache import quantise_q8_0
from penstock.backend.passes.cuda.memory.cache_layout import CacheLayout
from penstock.backend.passes.cuda.step.step_rows import RowArrays

NOT_A_PAGE = 1 << 30
"""An entry of a page table that must not be read."""

STEEP_TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2, "q8_0": 1e-1, "fp8": 2e-2}
"""Relative tolerance for steep rows: a logit of 200 has 100 times the error of a logit of 2."""


@dataclass(frozen=True)
class Row:
    """Tokens history … history + length - 1 of a sequence. The seed determines all of the sequence's numbers.

    In steep rows every logit is far from 0 and from the logits of other tiles. In the first half of a group's heads
    logits are above 100 and fall with the token; in the other half they are below -100 and rise.
    """

    history: int
    length: int
    seed: int = 0
    is_steep: bool = False

    @property
    def end(self) -> int:
        return self.history + self.length


@dataclass(frozen=True)
class Heads:
    num_heads: int
    layout: CacheLayout

    @property
    def group(self) -> int:
        return self.num_heads // self.layout.num_kv_heads

    @property
    def per_token(self) -> int:
        return self.num_heads + 2 * self.layout.num_kv_heads


@dataclass
class PagedRows:
    """A step of rows. qkv contains their queries; its keys and values are NaN, because only the cache is read."""

    heads: Heads
    rows: list[Row]
    arrays: RowArrays
    qkv: Tensor
    layer_cache: Tensor
    page_table: Tensor
    sinks: Tensor
    """[num_heads]: the sink of every other head."""

    @classmethod
    def of(cls, heads: Heads, rows: list[Row], act: torch.dtype, seed: int = 0, window_tokens: int = 0) -> PagedRows:
        """Draw pages and slots from the seed. Pages before every token's window are not allocated."""
        layout, deal = heads.layout, np.random.default_rng(seed)
        page_size = layout.page_size_tokens
        num_pages = sum(-(-row.end // page_size) for row in rows) + 3
        free_pages, slots = deal.permutation(num_pages).tolist(), deal.permutation(len(rows) + 2)[: len(rows)]
        layer_cache = torch.full((num_pages * layout.page_bytes,), 0xFF, dtype=torch.uint8)
        max_pages = max(-(-row.end // page_size) for row in rows) + 2
        page_table = torch.full((len(rows) + 2, max_pages), NOT_A_PAGE, dtype=torch.int32)
        qkv = torch.full((sum(row.length for row in rows), heads.per_token, layout.head_dim), torch.nan, dtype=act)
        starts = np.cumsum([0, *(row.length for row in rows)])
        for row, slot, start in zip(rows, slots.tolist(), starts.tolist(), strict=False):
            first = max(row.history - window_tokens + 1, 0) // page_size if window_tokens else 0
            pages = torch.tensor([free_pages.pop() for _ in range(first, -(-row.end // page_size))])
            page_table[slot, first : first + len(pages)] = pages.int()
            q, k, v = _draw(heads, row)
            qkv[start : start + row.length, : heads.num_heads] = q[row.history :].to(act)
            for which, x in enumerate((k, v)):
                _write(layout, layer_cache, pages, x[first * page_size :], which)
        arrays = RowArrays(
            query_starts=torch.from_numpy(starts.astype(np.int32)),
            context_lens=torch.tensor([row.history for row in rows], dtype=torch.int32),
            slots=torch.from_numpy(slots.astype(np.int32)),
        )
        has_none = (torch.arange(heads.num_heads) % 2 == 1) | any(row.is_steep for row in rows)
        sinks = torch.linspace(3.0, -1.0, heads.num_heads).masked_fill(has_none, -torch.inf)
        return cls(heads, rows, arrays, qkv, layer_cache, page_table, sinks)

    def visible_ends(self) -> Tensor:
        """`StepBatch.visible_ends` of a step in which positions 30 n + 5 to 30 n + 24 are a picture."""
        ends = []
        for row in self.rows:
            own = torch.arange(row.history, row.end)
            first = own - own % 30 + 5
            is_picture = (own >= first) & (own < first + 20) & (first >= row.history) & (first + 20 <= row.end)
            ends.append(torch.where(is_picture, first + 20, own + 1))
        return torch.cat(ends).int()

    def expected(self, scale: float, window_tokens: int, softcap: float, *, sees_ahead: bool = False) -> Tensor:
        """[T, num_heads, head_dim] float64"""
        outputs, ends = [], self.visible_ends()
        for row, start in zip(self.rows, self.arrays.query_starts.tolist(), strict=False):
            _, k, v = _draw(self.heads, row)
            keys, values = (encode(x, self.heads.layout.kv_dtype)[2] for x in (k, v))
            q = self.qkv[start : start + row.length, : self.heads.num_heads].double()
            logits = torch.einsum("qkgd,tkd->qkgt", q.view(row.length, -1, self.heads.group, q.shape[-1]), keys) * scale
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            behind = torch.arange(row.history, row.end)[:, None] - torch.arange(row.end)
            ahead = torch.arange(row.end) >= ends[start : start + row.length, None] if sees_ahead else behind < 0
            unseen = ahead | (behind >= (window_tokens or row.end))
            logits = logits.masked_fill(unseen[:, None, None], -torch.inf)
            sinks = self.sinks.double().view(1, -1, self.heads.group, 1).expand(*logits.shape[:3], 1)
            weights = torch.cat([logits, sinks], dim=-1).softmax(-1)[..., :-1]
            outputs.append(torch.einsum("qkgt,tkd->qkgd", weights, values).flatten(1, 2))
        return torch.cat(outputs)


def encode(x: Tensor, kv_dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Encode x [..., head_dim]: return its bytes, its scales' bytes, and the represented numbers in float64."""
    if kv_dtype == "q8_0":
        numbers, scales = quantise_q8_0(x)
        value = (numbers.double() * scales.double()).flatten(-2)
        return numbers.flatten(-2).view(torch.uint8), scales.squeeze(-1).contiguous().view(torch.uint8), value
    y = x.to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[kv_dtype])
    return y.view(torch.uint8), torch.empty(*x.shape[:-1], 0, dtype=torch.uint8), y.double()


@cache
def _sequence(seed: int, heads_per_token: int, head_dim: int, num_tokens: int) -> Tensor:
    return torch.from_numpy(
        np.random.default_rng(seed).standard_normal((num_tokens, heads_per_token, head_dim))
    ).float()


def _draw(heads: Heads, row: Row) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a sequence's tokens up to the row's end, [end, heads, head_dim]; equal for all rows of a sequence."""
    num_kv_heads = heads.layout.num_kv_heads
    numbers = _sequence(row.seed, heads.per_token, heads.layout.head_dim, row.end)
    q, k, v = torch.split(numbers, [heads.num_heads, num_kv_heads, num_kv_heads], dim=1)
    k = 2 * k
    if row.is_steep:
        q = q.clone()
        rises = 2 * (torch.arange(heads.num_heads) % heads.group) + 1 >= heads.group
        q[:, :, 0] = torch.where(rises, 32.0, -32.0)
        k[:, :, 0] = torch.arange(row.end).clamp(max=128)[:, None] / 2 - 112
    return q, k, v


def _write(layout: CacheLayout, layer_cache: Tensor, pages: Tensor, x: Tensor, which: int) -> None:
    """Write x [n, num_kv_heads, head_dim] to pages, from their first place. which: 0 keys, 1 values."""
    numbers, scales, _ = encode(x, layout.kv_dtype)
    blocks = layer_cache.view(-1, 2, layout.num_kv_heads, layout.block_bytes)
    tokens = torch.arange(len(x))
    page, place = pages[tokens // layout.page_size_tokens], tokens % layout.page_size_tokens
    start = 0
    for part in (numbers, scales):
        if part.numel():
            offsets = start + place[:, None] * part.shape[-1] + torch.arange(part.shape[-1])
            blocks[page[:, None], which, :, offsets] = part.transpose(1, 2)
            start += layout.page_size_tokens * part.shape[-1]
