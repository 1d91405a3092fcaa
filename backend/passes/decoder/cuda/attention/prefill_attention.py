"""Attention of rows of any number of tokens, over the paged keys and values of their sequences, on the device.

The host cuts a step's rows into tiles of queries, a few numbers that travel with the step; `attend`, once a layer, has
a block for each tile and KV head. What a token becomes depends on its sequence and position alone, not on how the
sequence was cut into steps (kernels/prefill_attention.cu).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.passes.decoder.cuda.attention.kernel_limits import HEAD_DIMS, check_logits, check_shape
from penstock.backend.passes.decoder.cuda.device.launcher import ACT_MACRO, Kernel, Launcher
from penstock.backend.passes.decoder.cuda.kv_cache.cache_layout import KV_MACRO, CacheLayout
from penstock.backend.passes.decoder.ops import supports_q8_0

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.backend.passes.decoder.cuda.step.step_rows import RowArrays

MAX_TILES = 65535
"""Blocks of a grid in its second dimension."""
_ACTS = {dtype: np.int32(value) for dtype, value in ACT_MACRO.items()}


def kernels() -> Iterator[Kernel]:
    """Every instantiation."""
    for kv_dtype in KV_MACRO:
        for head_dim in HEAD_DIMS:
            if kv_dtype != "q8_0" or supports_q8_0(head_dim):
                yield _attention(kv_dtype, head_dim)


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    """Attention of the layers that have the same window.

    scale, above 0, multiplies q · k; softcap, where not 0, bounds the logits by cap · tanh(logit / cap). A token sees
    itself and window_tokens - 1 before it, or all with 0. Raises ValueError for what no kernel covers.
    """

    layout: CacheLayout
    num_heads: int
    scale: float
    window_tokens: int = 0
    softcap: float = 0.0

    kernel: Kernel = field(init=False)
    _scalars: tuple[np.int32 | np.float32, ...] = field(init=False)

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
        object.__setattr__(self, "kernel", _attention(layout.kv_dtype, layout.head_dim))
        object.__setattr__(self, "_scalars", scalars)

    def kernels(self) -> tuple[Kernel, ...]:
        """What `Launcher.prepare` should have."""
        return (self.kernel,)

    @property
    def _group(self) -> int:
        return self.num_heads // self.layout.num_kv_heads

    def tiles(
        self, query_starts: NDArray[np.int32], context_lens: NDArray[np.int32], first_row: int = 0
    ) -> NDArray[np.int32]:
        """[n, 2] (row, first of its queries), for the rows from first_row on; n is at most R + T * group // 32. Tiles
        with the most keys to see come first. The same for all layers of a model.

        query_starts [R + 1], context_lens [R]: of the step. A row of k tokens has k * group queries a KV head, token
        by token. Raises ValueError for a step of more tiles than a launch can have.
        """
        rows_per_tile = _query_rows(self.layout.kv_dtype, self.layout.head_dim)
        num_queries = np.diff(query_starts[first_row:]).astype(np.int64) * self._group
        num_tiles = -(-num_queries // rows_per_tile)
        total = int(num_tiles.sum())
        if total > MAX_TILES:
            raise ValueError(f"the step has {total} tiles of queries; at most {MAX_TILES} are allowed")
        rows = np.repeat(np.arange(len(num_tiles)), num_tiles)
        first = (np.arange(total) - np.repeat(num_tiles.cumsum() - num_tiles, num_tiles)) * rows_per_tile
        last = np.minimum(first + rows_per_tile, num_queries[rows]) - 1
        last_position = context_lens[first_row:][rows] + last // self._group
        order = np.argsort(-last_position, kind="stable")
        return np.stack([rows + first_row, first], axis=1).astype(np.int32)[order]

    def attend(
        self,
        launcher: Launcher,
        qkv: Tensor,
        layer_cache: Tensor,
        page_table: Tensor,
        rows: RowArrays,
        tiles: Tensor,
        out: Tensor,
    ) -> None:
        """out of each token of the rows that tiles has; the rest of it is left as it is.

        qkv [T, (num_heads + 2 num_kv_heads) * head_dim] and out [T, num_heads * head_dim]: fp32, bf16 or fp16, the
        same. layer_cache: uint8, the layer's pages, which have the rows' own keys and values. page_table: int32
        [max_slots, max_pages]. tiles: int32, what `tiles` made of these rows, in any shape.
        """
        if out.dtype != qkv.dtype:
            raise ValueError(f"queries are {qkv.dtype}, and the output {out.dtype}")
        launcher.launch(
            self.kernel,
            (self.layout.num_kv_heads, tiles.numel() // 2, 1),
            out,
            qkv,
            layer_cache,
            page_table,
            rows.context_lens,
            rows.query_starts,
            rows.slots,
            tiles,
            _ACTS[qkv.dtype],
            np.int32(page_table.shape[1]),
            *self._scalars,
        )


def _query_rows(kv_dtype: str, head_dim: int) -> int:
    """kQueryRows of the kernels."""
    if kv_dtype == "fp32":
        return 64 if head_dim <= 128 else 32
    return 128 if head_dim <= 128 else 64


def _attention(kv_dtype: str, head_dim: int) -> Kernel:
    macros = (("KV_DTYPE", KV_MACRO[kv_dtype]), ("HEAD_DIM", head_dim))
    query_rows = _query_rows(kv_dtype, head_dim)
    if kv_dtype == "fp32":
        shared_bytes = (query_rows + 2 * 32) * head_dim * 4
        return Kernel("prefill_attention_fp32.cu", "prefill_attention_fp32", macros, 256, shared_bytes)
    tile_values = (64 if head_dim <= 128 else 32) * head_dim
    if kv_dtype == "bf16":
        stream_bytes = 3 * tile_values * 2
    else:
        # Of keys and of values: the tile, and the bytes that it is made of, in q8_0 a word with the scale of each 16.
        stream_bytes = 2 * (tile_values * 2 + tile_values + (tile_values // 4 if kv_dtype == "q8_0" else 0))
    shared_bytes = query_rows * (head_dim * 2 + 4) + stream_bytes
    return Kernel("prefill_attention.cu", "prefill_attention", macros, 128, shared_bytes)
