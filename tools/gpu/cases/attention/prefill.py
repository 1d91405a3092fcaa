"""Prefill attention: steps of rows of any length, over caches that are NaN outside the rows' tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.backend.passes.cuda.attention.prefill_attention import PrefillAttention, cut_tiles
from penstock.backend.passes.cuda.attention.prefill_segments import SEGMENT_STARTS, whole_tiles
from penstock.backend.passes.cuda.device.kernel_choices import CONSTANTS, KernelChoices
from penstock.backend.passes.cuda.device.launcher import Launcher
from penstock.backend.passes.cuda.memory.cache_layout import CacheLayout
from penstock.tools.gpu.cases.attention.paged_rows import STEEP_TOLERANCE, Heads, PagedRows, Row
from penstock.tools.gpu.cases.check import require, require_same_bits, require_within

ACT_OF = {"fp32": torch.float32, "bf16": torch.bfloat16, "q8_0": torch.float16, "fp8": torch.float16}
"""KV dtype → dtype of the queries in which the products lose no precision."""
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3, "q8_0": 2e-3, "fp8": 2e-3}
SEGMENTED = (2035, 30), (4096, 1), (0, 90)
"""Histories and lengths of rows with several segments of context, and of one beside them; few, for emulators."""
FAR_SEGMENTS = (16_380, 40), (21_000, 60)
"""The same with segments that are longer than the first ones."""


def attention_of(
    head_dim: int = 64,
    kv_dtype: str = "bf16",
    *,
    kv_heads: int = 1,
    group: int = 2,
    page_size: int = 16,
    window: int = 0,
    softcap: float = 0.0,
    choices: KernelChoices = CONSTANTS,
    has_wgmma: bool = False,
    num_sms: int = 2,
    sees_ahead: bool = False,
) -> PrefillAttention:
    layout, num_heads = CacheLayout(1, 0, page_size, kv_heads, head_dim, kv_dtype), kv_heads * group
    return PrefillAttention(layout, num_heads, head_dim**-0.5, window, softcap, choices, has_wgmma, num_sms, sees_ahead)


def rows_of(*shapes: tuple[int, int]) -> list[Row]:
    """Rows of different sequences, from (history, length)."""
    return [Row(history, length, seed) for seed, (history, length) in enumerate(shapes)]


def prepare(attention: PrefillAttention, rows: list[Row], act: torch.dtype | None = None, seed: int = 0) -> PagedRows:
    heads = Heads(attention.num_heads, attention.layout)
    return PagedRows.of(heads, rows, act or ACT_OF[attention.layout.kv_dtype], seed, attention.window_tokens)


def run(
    attention: PrefillAttention,
    step: PagedRows,
    launcher: Launcher,
    first_row: int = 0,
    tiles: NDArray[np.int32] | None = None,
) -> Tensor:
    """Run the kernel. Returns [T, H, D], NaN in rows before first_row. tiles: the attention's own, if None."""
    arrays, ends = step.arrays, step.visible_ends() if attention.sees_ahead else None
    out = torch.full((len(step.qkv), attention.num_heads, attention.layout.head_dim), torch.nan, dtype=step.qkv.dtype)
    if tiles is None:
        visible_ends = None if ends is None else ends.numpy()
        tiles = attention.tiles(arrays.query_starts.numpy(), arrays.context_lens.numpy(), first_row, visible_ends)
    workspace = attention.workspace_sizes(len(out), max(row.end for row in step.rows)).make("cpu")
    for tensor in (workspace.merged_sums, workspace.merged_peaks, workspace.part_sums, workspace.part_peaks):
        tensor.fill_(torch.nan)
    attention.attend(
        launcher, workspace, step.qkv.flatten(1), step.layer_cache, step.page_table, arrays, torch.from_numpy(tiles),
        step.sinks, out, ends,
    )  # fmt: skip
    require("the kernel left tickets that are not zero", not workspace.tickets.any())
    return out


def error_of(attention: PrefillAttention, step: PagedRows, out: Tensor) -> float:
    """The largest relative error of any query in a result of `run`: an average would hide a missing token."""
    settings = attention.scale, attention.window_tokens, attention.softcap
    expected = step.expected(*settings, sees_ahead=attention.sees_ahead)
    return relative_error(out, expected)


def check_steep(launcher: Launcher, kv_dtype: str) -> float:
    attention = attention_of(64, kv_dtype)
    step = prepare(attention, [Row(0, 1, 1, is_steep=True), Row(40, 90, 2, is_steep=True)])
    error = error_of(attention, step, run(attention, step, launcher))
    return require_within("relative error of a query", error, STEEP_TOLERANCE[kv_dtype])


def check_segments(
    launcher: Launcher, attention: PrefillAttention, shapes: tuple[tuple[int, int], ...] = SEGMENTED
) -> float:
    """Check contexts of several segments. The bits are the same from one block for all segments of a tile and from a
    block for each, and if the first row comes in chunks, which end at a segment's end and beside it."""
    rows = rows_of(*shapes)
    step = widened(prepare(attention, rows))
    out = run(attention, step, launcher)
    error = require_within(
        "relative error of a query", error_of(attention, step, out), TOLERANCE[attention.layout.kv_dtype]
    )
    whole = run(attention, step, launcher, tiles=one_block_tiles(attention, step))
    require_same_bits("one block for all segments", whole, out)
    row = rows[0]
    middle = int(SEGMENT_STARTS[np.searchsorted(SEGMENT_STARTS, row.history, side="right")])
    ends = (row.history, middle - 1, middle, row.end)
    chunks = [Row(at, end - at, row.seed) for at, end in pairwise(ends)]
    parts = [run(attention, widened(prepare(attention, [chunk], seed=chunk.end)), launcher) for chunk in chunks]
    require_same_bits("the first row in chunks", torch.cat(parts), out[: row.length])
    return error


def widened(step: PagedRows) -> PagedRows:
    """Return the step with its queries in fp32: results of 16 bits would hide most differences."""
    return replace(step, qkv=step.qkv.float())


def one_block_tiles(attention: PrefillAttention, step: PagedRows) -> NDArray[np.int32]:
    """Return the step's tiles with one block for all segments of each."""
    starts, contexts = step.arrays.query_starts.numpy(), step.arrays.context_lens.numpy()
    return whole_tiles(cut_tiles(starts, contexts, step.heads.group, attention.tile_rows))


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float(((found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).amax())
