"""Attention of wide heads, of decodes and prompts together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.backend.passes.cuda.attention.wide_attention import WideAttention
from penstock.backend.passes.cuda.device.launcher import ACT_MACRO, Launcher
from penstock.backend.passes.cuda.memory.cache_layout import CacheLayout
from penstock.tools.gpu.cases.attention.decode import TOLERANCE
from penstock.tools.gpu.cases.attention.paged_rows import Heads, PagedRows, Row
from penstock.tools.gpu.cases.check import require, require_same_bits, require_within

_NO_TILES: Any = None


@dataclass(frozen=True)
class WideCase:
    head_dim: int
    kv_dtype: str
    act: torch.dtype
    softcap: float = 0.0

    def run(self, launcher: Launcher, rows: list[Row], seed: int = 0) -> tuple[Tensor, float]:
        """Return [T, heads, head_dim], and the largest error relative to a head's largest output.

        The last row has no slot.
        """
        layout = CacheLayout(1, 0, 16, 2, self.head_dim, self.kv_dtype)
        step = PagedRows.of(Heads(4, layout), rows, self.act, seed)
        step.sinks.fill_(-torch.inf)
        expected = step.expected(self.head_dim**-0.5, 0, self.softcap)
        step.arrays.slots[-1] = -1
        out = torch.full_like(step.qkv[:, :4], torch.nan)
        attention = WideAttention(layout, 4, self.head_dim**-0.5, self.softcap, _NO_TILES, ACT_MACRO[self.act])
        attention.launch(launcher, step.qkv.flatten(1), step.layer_cache, step.page_table, step.arrays, out)
        end = int(step.arrays.query_starts[-2])
        require("a row without a slot was written", bool(out[end:].isnan().all()))
        found, expected = out[:end].double(), expected[:end]
        return out[:end], float(((found - expected).abs().amax(-1) / expected.abs().amax(-1)).amax())


def check_wide(launcher: Launcher, case: WideCase) -> float:
    """Check contexts of less than a group of tokens, of a part of the warps, and of several turns."""
    rows = [Row(0, 1, 1), Row(70, 1, 2), Row(2, 9, 3), Row(0, 40, 4), Row(0, 2, 5)]
    return require_within("of a head", case.run(launcher, rows)[1], TOLERANCE[case.act])


def check_wide_cuts(launcher: Launcher, case: WideCase) -> None:
    """Check that a token has the same bits in any chunk."""
    padding = Row(0, 1, 9)
    whole, _ = case.run(launcher, [Row(0, 45), padding])
    chunks = [case.run(launcher, [Row(at, 15), padding], seed=at)[0] for at in (0, 15, 30)]
    require_same_bits("in chunks", torch.cat(chunks), whole)
