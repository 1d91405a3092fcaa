"""Decode attention: steps of rows with one token each, over caches that are NaN wherever no row may look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from backend.passes.decoder.cuda.cache_layout import KV_MACRO, CacheLayout
from backend.passes.decoder.cuda.decode_attention import DecodeAttention
from tools.gpu_check.cases.comparing import require
from tools.gpu_check.cases.paged_rows import Heads, PagedRows, Row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from backend.passes.decoder.cuda.decode_attention import DecodeWorkspace
    from backend.passes.decoder.cuda.launcher import Launcher

H200_SHARED_BYTES = 228 * 1024
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Of the largest output, by the outputs' dtype."""
ACT_OF = {kv_dtype: torch.float32 if kv_dtype == "fp32" else torch.bfloat16 for kv_dtype in KV_MACRO}


def row_of(length: int, seed: int) -> Row:
    """At its last token."""
    return Row(length - 1, 1, seed)


def rows_of(*lengths: int) -> list[Row]:
    return [row_of(length, seed) for seed, length in enumerate(lengths)]


def attention_of(
    head_dim: int = 64,
    kv_dtype: str = "bf16",
    *,
    kv_heads: int = 2,
    group: int = 4,
    page_size: int = 16,
    num_sms: int = 3,
    shared_bytes: int = H200_SHARED_BYTES,
    max_rows: int = 16,
    max_context: int = 8192,
    window: int = 0,
    softcap: float = 0.0,
) -> DecodeAttention:
    return DecodeAttention(
        CacheLayout(1, 0, page_size, kv_heads, head_dim, kv_dtype),
        kv_heads * group,
        head_dim**-0.5,
        max_rows=max_rows,
        max_context_tokens=max_context,
        num_sms=num_sms,
        shared_bytes_per_sm=shared_bytes,
        window_tokens=window,
        softcap=softcap,
    )


@dataclass(frozen=True)
class DecodeCase:
    attention: DecodeAttention
    step: PagedRows

    @classmethod
    def of(
        cls, attention: DecodeAttention, rows: Sequence[Row | None], act: torch.dtype | None = None, seed: int = 0
    ) -> DecodeCase:
        """None is a row without a slot."""
        heads = Heads(attention.num_heads, attention.layout)
        act = act or ACT_OF[attention.layout.kv_dtype]
        step = PagedRows.of(heads, [row or row_of(1, 0) for row in rows], act, seed, attention.window_tokens)
        for r, row in enumerate(rows):
            if row is None:
                step.arrays.slots[r], step.arrays.context_lens[r] = -1, 10**6
        return cls(attention, step)

    def run(self, launcher: Launcher, workspace: DecodeWorkspace | None = None) -> Tensor:
        """[R, num_heads, head_dim]; NaN for rows without a slot. Raises Mismatch."""
        step, arrays = self.step, self.step.arrays
        workspace = workspace or poisoned_workspace(self.attention)
        out = torch.full_like(step.qkv[:, : self.attention.num_heads], torch.nan)
        self.attention.plan(launcher, workspace, arrays.context_lens, arrays.slots, len(arrays.slots))
        self.attention.attend(launcher, workspace, step.qkv.flatten(1), step.layer_cache, step.page_table, out)
        require("tickets are left behind", not workspace.tickets.any())
        require("a row without a slot was written", bool(out[arrays.slots < 0].isnan().all()))
        return out

    def error(self, out: Tensor) -> float:
        """Of what `run` gave: the largest difference to float64, relative to the largest output."""
        attention, planned = self.attention, self.step.arrays.slots >= 0
        expected = self.step.expected(attention.scale, attention.window_tokens, attention.softcap)[planned]
        return float((out[planned] - expected).abs().amax() / expected.abs().amax())


def poisoned_workspace(attention: DecodeAttention) -> DecodeWorkspace:
    workspace = attention.make_workspace("cpu")
    for tensor in (workspace.partial_out, workspace.partial_peaks):
        tensor.fill_(torch.nan)
    workspace.items.fill_(-1)
    workspace.num_items.fill_(-1)
    return workspace
