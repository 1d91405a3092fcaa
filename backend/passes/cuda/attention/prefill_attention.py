"""Attention of rows of any number of tokens over the paged keys and values of their sequences.

The host cuts a step's rows into tiles of queries and sends the list with the step. `attend`, once per layer, launches a
block per tile and KV head. A token's output depends only on its sequence and position, not on how the sequence was cut
into steps (kernels/prefill/prefill_attention.cu).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.backend.passes.cuda.attention.kernel_limits import (
    HEAD_DIMS,
    SHORTEST_SEGMENT_TOKENS,
    check_logits,
    check_shape,
)
from penstock.backend.passes.cuda.attention.prefill_segments import (
    PrefillWorkspace,
    WorkspaceSizes,
    cut_segments,
    max_parts,
    whole_tiles,
)
from penstock.backend.passes.cuda.device.kernel_choices import CONSTANTS, KernelChoices
from penstock.backend.passes.cuda.device.launcher import ACT_MACRO, Grid, Kernel, Launcher, TensorMap, int32
from penstock.backend.passes.cuda.device.transfers import Ints
from penstock.backend.passes.cuda.memory.cache_layout import KV_MACRO, CacheLayout
from penstock.backend.passes.cuda.step.step_rows import RowArrays
from penstock.backend.passes.ops.interface import supports_q8_0

WGMMA_CAPABILITY = (9, 0)
"""Compute capability of the GPUs that have a kernel with products of warpgroups."""
MAX_TILES = 65535
"""CUDA's limit of blocks in a grid's second dimension."""
_SPARE_TILES = 64
"""Tiles of a captured step beyond those of one long row, for more rows or for segments.

An unused tile is a block that ends at once, in every layer.
"""
_ACTS = {dtype: np.int32(value) for dtype, value in ACT_MACRO.items()}


def kernels() -> Iterator[Kernel]:
    """Yield every instantiation."""
    for kv_dtype in KV_MACRO:
        for head_dim in HEAD_DIMS:
            if kv_dtype != "q8_0" or supports_q8_0(head_dim):
                yield from (_attention(kv_dtype, head_dim, sees_ahead=sees_ahead) for sees_ahead in (False, True))
                if _has_wgmma_kernel(kv_dtype, head_dim):
                    yield _wgmma_kernel(kv_dtype, head_dim)


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    """Attention of all layers that have the same window.

    scale, above 0, multiplies q · k. softcap, unless 0, bounds the logits: cap · tanh(logit / cap). A token sees itself
    and the window_tokens - 1 tokens before it, or all tokens if window_tokens is 0. has_wgmma: the device is of
    WGMMA_CAPABILITY; it has num_sms multiprocessors. sees_ahead: steps may have `StepBatch.visible_ends`; these have a
    kernel of their own, without wgmma, whose tiles are as large with heads of up to 128. Raises ValueError for what no
    kernel supports.
    """

    layout: CacheLayout
    num_heads: int
    scale: float
    window_tokens: int = 0
    softcap: float = 0.0
    choices: KernelChoices = CONSTANTS
    has_wgmma: bool = False
    num_sms: int = 132
    sees_ahead: bool = False

    kernel: Kernel = field(init=False)
    _scalars: tuple[np.int32 | np.float32, ...] = field(init=False)
    _maps: dict[int, TensorMap] = field(init=False, compare=False, repr=False)
    """The map of each layer's cache, by its address. It keeps the cache's memory."""

    def __post_init__(self) -> None:
        layout = self.layout
        check_shape(layout, self.num_heads)
        check_logits(self.scale, self.window_tokens, self.softcap)
        scalars = (
            np.int32(layout.page_size_tokens.bit_length() - 1),
            np.int32(self._group),
            np.int32(self.window_tokens),
            np.float32(self.scale),
            np.float32(self.softcap),
        )
        kernel = _attention(layout.kv_dtype, layout.head_dim, self.choices)
        if self.has_wgmma and self.choices.uses_wgmma and _has_wgmma_kernel(layout.kv_dtype, layout.head_dim):
            kernel = _wgmma_kernel(layout.kv_dtype, layout.head_dim)
        object.__setattr__(self, "kernel", kernel)
        object.__setattr__(self, "_scalars", scalars)
        object.__setattr__(self, "_maps", {})

    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels to pass to `Launcher.prepare`."""
        return (self.kernel, self._ahead_kernel) if self.sees_ahead else (self.kernel,)

    @property
    def _ahead_kernel(self) -> Kernel:
        return _attention(self.layout.kv_dtype, self.layout.head_dim, self.choices, sees_ahead=True)

    @property
    def _group(self) -> int:
        return self.num_heads // self.layout.num_kv_heads

    def workspace_sizes(self, max_tokens: int, max_context_tokens: int) -> WorkspaceSizes:
        """Return the sizes of the workspace for steps of max_tokens and contexts of max_context_tokens."""
        layout, is_cut = self.layout, self._has_segments and max_context_tokens > SHORTEST_SEGMENT_TOKENS
        return WorkspaceSizes(
            max_tokens if is_cut else 0,
            max_parts(layout.num_kv_heads) if is_cut else 0,
            self.num_heads,
            layout.num_kv_heads,
            self.tile_rows,
            layout.head_dim,
        )

    def tiles(
        self, query_starts: Ints, context_lens: Ints, first_row: int = 0, visible_ends: Ints | None = None
    ) -> Ints:
        """Return the blocks [n, 4] of first_row and the rows after it.

        A block is (row, first query of the tile within its row, first position of its segment of the context or -1,
        slot of the workspace). n is at most R + T * group

        32 + max_parts. Blocks with the most keys come first. They serve all layers of a model: a windowed layer's
        blocks go through all of a tile's keys, and skip all segments but the first.

        query_starts [R + 1], context_lens [R] and visible_ends [T] describe the step. A row of k tokens has k * group
        queries per KV head, token by token. Raises ValueError if a launch cannot have that many tiles.
        """
        tiles, last_positions = _tiles_and_ends(
            query_starts,
            context_lens,
            self._group,
            self.tile_rows,
            first_row,
            visible_ends if self.sees_ahead else None,
        )
        if not self._has_segments:
            return whole_tiles(tiles)
        return cut_segments(tiles, last_positions, self.layout.num_kv_heads)

    def captured_tiles(self, num_tokens: int) -> int:
        """Return the number of tiles in a captured step of num_tokens."""
        return -(-num_tokens * self._group // self.tile_rows) + _SPARE_TILES

    @property
    def tile_rows(self) -> int:
        if self.kernel.needs_wgmma:
            return _WGMMA_QUERY_ROWS
        return query_rows(self.layout.kv_dtype, self.layout.head_dim, self.choices)

    @property
    def _has_segments(self) -> bool:
        return self.window_tokens == 0 and self.layout.kv_dtype != "fp32"

    def attend(
        self,
        launcher: Launcher,
        workspace: PrefillWorkspace,
        qkv: Tensor,
        layer_cache: Tensor,
        page_table: Tensor,
        rows: RowArrays,
        tiles: Tensor,
        sinks: Tensor,
        out: Tensor,
        visible_ends: Tensor | None = None,
    ) -> None:
        """Write out for each token of the rows in tiles; the rest of out does not change.

        qkv [T, any number of heads * head_dim], with the queries first, and out [T, num_heads * head_dim] have the
        same dtype: fp32, bf16 or fp16. layer_cache: uint8, the layer's pages, which already hold the rows' own keys and
        values. page_table: int32 [max_slots, max_pages]. workspace: of `workspace_sizes`. tiles: int32 in any shape,
        the result of `tiles` for these rows. sinks: as of `DecodeAttention.attend`. visible_ends: int32 [T].
        """
        if out.dtype != qkv.dtype:
            raise ValueError(f"queries are {qkv.dtype}, but the output is {out.dtype}; they must be the same")
        kernel, ends = self.kernel, tiles  # not read
        if self.sees_ahead and visible_ends is not None:
            kernel, ends = self._ahead_kernel, visible_ends
        num_kv_heads, num_tiles = self.layout.num_kv_heads, tiles.numel() // 4
        grid: Grid = (num_kv_heads, num_tiles, 1)
        counts: tuple[np.int32, ...] = ()
        if kernel.needs_wgmma:
            num_tasks = num_kv_heads * num_tiles
            grid, counts = (min(self.num_sms, num_tasks), 1, 1), (int32(num_kv_heads), int32(num_tasks))
        launcher.launch(
            kernel,
            grid,
            out,
            qkv,
            self._map_of(layer_cache) if kernel.needs_wgmma and self.layout.kv_dtype == "bf16" else layer_cache,
            page_table,
            rows.context_lens,
            rows.query_starts,
            rows.slots,
            tiles,
            sinks,
            *self._results(workspace),
            *(() if kernel.needs_wgmma else (ends,)),
            _ACTS[qkv.dtype],
            int32(qkv.shape[1] // self.layout.head_dim),
            int32(page_table.shape[1]),
            *self._scalars,
            *counts,
        )

    def _map_of(self, layer_cache: Tensor) -> TensorMap:
        address = layer_cache.data_ptr()
        found = self._maps.get(address)
        if found is None:
            found = self._maps[address] = TensorMap(layer_cache, self.layout.head_dim, self.layout.page_size_tokens)
        return found

    def _results(self, workspace: PrefillWorkspace) -> tuple[Tensor, ...]:
        if self.layout.kv_dtype == "fp32":
            return ()
        parts = workspace.part_sums, workspace.part_peaks, workspace.tickets
        return workspace.merged_sums, workspace.merged_peaks, *parts


def most_captured_tiles(num_tokens: int, group: int, max_rows: int) -> int:
    """Return the most tiles of a captured step of num_tokens, with any kernel and with a tile for each row too."""
    return -(-num_tokens * group // _FEWEST_QUERY_ROWS) + _SPARE_TILES + min(max_rows, num_tokens)


def cut_tiles(query_starts: Ints, context_lens: Ints, group: int, rows_per_tile: int) -> Ints:
    """Return tiles [n, 2] of all rows of a step: (row, first query of the tile within its row), those with the most
    keys first. Raises ValueError if a launch cannot have that many.
    """
    return _tiles_and_ends(query_starts, context_lens, group, rows_per_tile, 0)[0]


def _tiles_and_ends(
    query_starts: Ints,
    context_lens: Ints,
    group: int,
    rows_per_tile: int,
    first_row: int,
    visible_ends: Ints | None = None,
) -> tuple[Ints, NDArray[np.int64]]:
    """Return the tiles of first_row and the rows after it, and the last position that each tile's last query sees."""
    num_queries = np.diff(query_starts[first_row:]).astype(np.int64) * group
    num_tiles = -(-num_queries // rows_per_tile)
    total = int(num_tiles.sum())
    if total > MAX_TILES:
        raise ValueError(f"the step has {total} tiles of queries; at most {MAX_TILES} are allowed")
    rows = np.repeat(np.arange(len(num_tiles)), num_tiles)
    first = (np.arange(total) - np.repeat(num_tiles.cumsum() - num_tiles, num_tiles)) * rows_per_tile
    last = np.minimum(first + rows_per_tile, num_queries[rows]) - 1
    last_position = context_lens[first_row:][rows] + last // group
    if visible_ends is not None:
        last_position = visible_ends[query_starts[first_row:][rows] + last // group] - 1
    order = np.argsort(-last_position, kind="stable")
    return np.stack([rows + first_row, first], axis=1).astype(np.int32)[order], last_position[order]


_FEWEST_QUERY_ROWS = 32


def query_rows(kv_dtype: str, head_dim: int, choices: KernelChoices = CONSTANTS) -> int:
    """Return kQueryRows of the kernels."""
    if kv_dtype == "fp32":
        return 64 if head_dim <= 128 else 32
    return choices.query_rows if head_dim <= 128 else 64


def shared_bytes(kv_dtype: str, head_dim: int, choices: KernelChoices = CONSTANTS) -> int:
    """Return the dynamic shared memory of the kernels: queries and their positions, and a stream of keys and values."""
    num_rows = query_rows(kv_dtype, head_dim, choices)
    if kv_dtype == "fp32":
        return (num_rows + 2 * 32) * head_dim * 4
    tile_values = (choices.key_tokens if head_dim <= 128 else 32) * head_dim
    if kv_dtype == "bf16":
        stream_bytes = 3 * tile_values * 2
    else:
        # Keys and values each need the tile and its quantised bytes; q8_0 has a word with the scale of each 16 bytes.
        stream_bytes = 2 * (tile_values * 2 + tile_values + (tile_values // 4 if kv_dtype == "q8_0" else 0))
    return num_rows * (head_dim * 2 + 4) + stream_bytes


def _tile(choices: KernelChoices) -> tuple[tuple[str, int], ...]:
    return ("QUERY_ROWS", choices.query_rows), ("KEY_TOKENS", choices.key_tokens)


@cache
def _attention(kv_dtype: str, head_dim: int, choices: KernelChoices = CONSTANTS, *, sees_ahead: bool = False) -> Kernel:
    macros: tuple[tuple[str, int], ...] = (("KV_DTYPE", KV_MACRO[kv_dtype]), ("HEAD_DIM", head_dim))
    if _tile(choices) != _tile(CONSTANTS) and kv_dtype != "fp32" and head_dim <= 128:
        macros = (*macros, *_tile(choices))
    num_bytes = shared_bytes(kv_dtype, head_dim, choices)
    if sees_ahead:
        macros = (*macros, ("SEES_AHEAD", 1))
        num_bytes += 4 * query_rows(kv_dtype, head_dim, choices) if kv_dtype != "fp32" else 0
    if kv_dtype == "fp32":
        return Kernel("prefill/prefill_attention_fp32.cu", "prefill_attention_fp32", macros, 256, num_bytes)
    return Kernel("prefill/prefill_attention.cu", "prefill_attention", macros, 128, num_bytes)


def _has_wgmma_kernel(kv_dtype: str, head_dim: int) -> bool:
    """Beside heads of 256 there are not enough registers to convert quantised numbers without spills."""
    return kv_dtype == "bf16" or (kv_dtype != "fp32" and head_dim <= 128)


def _wgmma_kernel(kv_dtype: str, head_dim: int) -> Kernel:
    """Return the kernel with products of warpgroups."""
    macros = (("KV_DTYPE", KV_MACRO[kv_dtype]), ("HEAD_DIM", head_dim))
    shared_bytes = _wgmma_shared_bytes(kv_dtype, head_dim)
    source = "prefill/prefill_attention_wgmma.cu"
    return Kernel(source, "prefill_attention_wgmma", macros, 384, shared_bytes, needs_wgmma=True)


_WGMMA_QUERY_ROWS = 128


def _wgmma_shared_bytes(kv_dtype: str, head_dim: int) -> int:
    """Return the size of the kernel's struct Shared: queries of two tasks, or of one; a ring of tiles, which has two
    barriers a tile and another one; quantised numbers of two tiles, with the scale of each 16; barriers, a number and
    positions for each task; and a flag. A multiple of 8."""
    tile_tokens, num_tasks = (128, 2) if head_dim <= 128 else (64, 1)
    ring_tiles = 3 if kv_dtype == "q8_0" and head_dim > 64 else 4
    row_bytes = 128 * -(-head_dim // 64)
    item_bytes = tile_tokens * head_dim // 16 * {"bf16": 0, "q8_0": 16 + 4, "fp8": 16}[kv_dtype]
    task_bytes = _WGMMA_QUERY_ROWS * (row_bytes + 4) + 3 * 8 + 4
    ring_bytes = ring_tiles * (tile_tokens * row_bytes + 2 * 8) + 8
    return -(-(num_tasks * task_bytes + ring_bytes + 2 * item_bytes + 4) // 8) * 8
