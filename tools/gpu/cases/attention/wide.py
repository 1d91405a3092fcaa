"""Wide heads: their attention, of decodes and prompts together, and the cache writes before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.backend.passes.cuda.attention.wide_attention import WideAttention
from penstock.backend.passes.cuda.device.launcher import ACT_MACRO, Launcher
from penstock.backend.passes.cuda.memory.cache_layout import CacheLayout
from penstock.tools.gpu.cases import elementwise
from penstock.tools.gpu.cases.attention.decode import TOLERANCE
from penstock.tools.gpu.cases.attention.paged_rows import Heads, PagedRows, Row
from penstock.tools.gpu.cases.check import require, require_close, require_same_bits, require_within
from penstock.tools.gpu.cases.elementwise import StoreCase, check_stored, expected_heads, rms_norm, rope_rows

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


def check_wide_store(launcher: Launcher, case: StoreCase, dtype: torch.dtype) -> float:
    """Check q, and k and v in the cache, all with norms; gates behind q do not change."""
    torch.manual_seed(case.heads.head_dim)
    heads, size = case.heads, case.heads.output_size
    qkv = torch.randn(case.num_tokens, heads.qkv_size + size).to(dtype)
    before, layer = qkv.clone(), torch.full((case.layout.layer_bytes,), 0xFF, dtype=torch.uint8)
    q_norm, k_norm, v_norm = torch.rand(3, heads.head_dim) + 0.5
    rope, norms = rope_rows(3 * case.page_size, case.rotary_dim), (q_norm, k_norm, v_norm)
    kernels = elementwise.make(launcher, dtype, heads, 64, case.rotary_dim, case.kv_dtype, case.page_size)
    kernels.rope_and_store_wide(qkv, layer, case.page_table, case.rows, rope, norms, heads)
    plain = torch.cat([before[:, :size], before[:, 2 * size :]], dim=1)
    q, k, v = expected_heads(plain, case, rope, (q_norm, k_norm), query_factor=1.0)
    written = [token for token, _, _ in case.places()]
    for token, page, place in case.places():
        for which, expected in ((0, k[token]), (1, rms_norm(v[token], v_norm).to(dtype))):
            numbers, scales = case.read(layer, which, page, place)
            check_stored(case.kv_dtype, numbers, scales, expected, dtype, exact=False)
    require_same_bits("all but q", qkv[:, size:], before[:, size:])
    require_same_bits("the padding row", qkv[1], before[1])
    found, expected = qkv[written, :size].view(len(written), -1, heads.head_dim), q[written].double()
    sizes, limit = expected.abs().amax(dim=-1, keepdim=True), elementwise.TOLERANCE[dtype]
    return require_close("queries", found.double() / sizes, expected / sizes, limit, 0.5 * limit)
