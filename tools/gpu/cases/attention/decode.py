"""Decode attention: steps of rows with one token each, over caches that are NaN outside the rows' tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from penstock.backend.passes.cuda.attention.decode_attention import DecodeAttention, DecodeWorkspace
from penstock.backend.passes.cuda.device.kernel_choices import CONSTANTS, KernelChoices
from penstock.backend.passes.cuda.device.launcher import Launcher
from penstock.backend.passes.cuda.memory.cache_layout import KV_MACRO, CacheLayout
from penstock.tools.gpu.cases.attention.paged_rows import STEEP_TOLERANCE, Heads, PagedRows, Row
from penstock.tools.gpu.cases.check import require, require_within

H200_SHARED_BYTES = 228 * 1024
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Output dtype → tolerance relative to the largest output of a row."""
ACT_OF = {kv_dtype: torch.float32 if kv_dtype == "fp32" else torch.bfloat16 for kv_dtype in KV_MACRO}


def row_of(length: int, seed: int) -> Row:
    """The row of a sequence's last token."""
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
    choices: KernelChoices = CONSTANTS,
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
        choices=choices,
    )


@dataclass(frozen=True)
class DecodeCase:
    attention: DecodeAttention
    step: PagedRows

    @classmethod
    def of(
        cls, attention: DecodeAttention, rows: Sequence[Row | None], act: torch.dtype | None = None, seed: int = 0
    ) -> DecodeCase:
        """Make a case; a row that is None has no slot."""
        heads = Heads(attention.num_heads, attention.layout)
        act = act or ACT_OF[attention.layout.kv_dtype]
        step = PagedRows.of(heads, [row or row_of(1, 0) for row in rows], act, seed, attention.window_tokens)
        for r, row in enumerate(rows):
            if row is None:
                step.arrays.slots[r], step.arrays.context_lens[r] = -1, 10**6
        return cls(attention, step)

    def run(self, launcher: Launcher, workspace: DecodeWorkspace | None = None) -> Tensor:
        """Run the kernels. Returns [R, num_heads, head_dim], NaN for rows without a slot. Raises Mismatch."""
        step, arrays = self.step, self.step.arrays
        workspace = workspace or poisoned_workspace(self.attention)
        out = torch.full_like(step.qkv[:, : self.attention.num_heads], torch.nan)
        self.attention.plan(launcher, workspace, arrays.context_lens, arrays.slots, len(arrays.slots))
        qkv, page_table = step.qkv.flatten(1), step.page_table
        self.attention.attend(launcher, workspace, qkv, step.layer_cache, page_table, step.sinks, out)
        require("the kernel left tickets that are not zero", not workspace.tickets.any())
        require("a row without a slot was written", bool(out[arrays.slots < 0].isnan().all()))
        return out

    def error(self, out: Tensor) -> float:
        """The largest difference of a result of `run` to float64, relative to the largest output of its row.

        The outputs of rows with few tokens are much larger than those of others, whose errors they would hide.
        """
        attention, planned = self.attention, self.step.arrays.slots >= 0
        expected = self.step.expected(attention.scale, attention.window_tokens, attention.softcap)[planned]
        dims = tuple(range(1, expected.dim()))
        return float(((out[planned] - expected).abs().amax(dims) / expected.abs().amax(dims)).amax())


def planned_items(
    launcher: Launcher, attention: DecodeAttention, context_lens: Tensor, slots: Tensor
) -> list[tuple[int, ...]]:
    """The plan's items in order: (row, slot, context length, chunk)."""
    workspace = poisoned_workspace(attention)
    attention.plan(launcher, workspace, context_lens, slots, len(slots))
    return [tuple(item) for item in workspace.items[: int(workspace.plan[0])].tolist()]


def check_steep(launcher: Launcher, kv_dtype: str, shared_bytes: int = H200_SHARED_BYTES) -> float:
    """Check steep rows with a full group, whose halves are in different rows of the fragments."""
    attention = attention_of(64, kv_dtype, kv_heads=1, group=16, shared_bytes=shared_bytes)
    case = DecodeCase.of(attention, [Row(length - 1, 1, length, is_steep=True) for length in (1, 40, 300)])
    return require_within(
        "error relative to the largest output of a row", case.error(case.run(launcher)), STEEP_TOLERANCE[kv_dtype]
    )


def check_long_chunk(launcher: Launcher, kv_dtype: str, shared_bytes: int = H200_SHARED_BYTES) -> float:
    """Check chunks with more tiles than the ring and more pages than a warp holds at once.

    Such chunks occur in contexts of tens of thousands of tokens; a small max_context_tokens makes shorter contexts
    have them too.
    """
    attention = attention_of(64, kv_dtype, kv_heads=1, group=1, max_context=256, shared_bytes=shared_bytes)
    case = DecodeCase.of(attention, rows_of(2200, 1300))
    out = case.run(launcher)
    return require_within("error relative to the largest output of a row", case.error(out), TOLERANCE[out.dtype])


def check_plan(launcher: Launcher) -> None:
    """Check that the plan has every chunk once, long ones first.

    There are more rows than a block has threads, rows without a slot, and rows with more chunks than a warp has lanes.
    """
    lengths = [*range(1, 600), 767, 768, 769, 8191, 8192, 8193, 8448, 8449, 20_000, 65_536]
    slots = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(0)).int()
    slots[::5] = -1
    attention = attention_of(kv_heads=1, group=1, max_rows=len(slots), max_context=max(lengths))
    items = planned_items(launcher, attention, torch.tensor(lengths, dtype=torch.int32) - 1, slots)
    expected = [
        (row, slot, length, chunk)
        for row, (slot, length) in enumerate(zip(slots.tolist(), lengths, strict=True))
        for chunk in range(-(-length // 256))
        if slot >= 0
    ]
    require("the plan does not contain every chunk exactly once", sorted(items) == sorted(expected))
    tokens = [min(256, length - 256 * chunk) for _, _, length, chunk in items]
    require("the plan has a short chunk before a longer one", all(b < max(1.25 * a, 4) for a, b in pairwise(tokens)))


def poisoned_workspace(attention: DecodeAttention) -> DecodeWorkspace:
    workspace = attention.make_workspace("cpu")
    for tensor in (workspace.partial_out, workspace.partial_peaks):
        tensor.fill_(torch.nan)
    workspace.items.fill_(-1)
    workspace.plan.fill_(-1)
    return workspace
