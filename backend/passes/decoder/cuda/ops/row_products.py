"""Products of a step of few rows with all that stands between them in a layer: five kernels a layer, with attention.

Weights stream through shared memory and begin before the kernel's input exists. A row's bits do not depend on the other
rows. Activations are bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from penstock.backend.passes.decoder.cuda.device.launcher import ACT_MACRO, Kernel
from penstock.backend.passes.decoder.cuda.kv_cache.cache_layout import KV_MACRO
from penstock.backend.passes.decoder.cuda.ops.matmul import CudaLinear

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from penstock.backend.passes.decoder.cuda.device.launcher import Launcher
    from penstock.backend.passes.decoder.cuda.kv_cache.cache_layout import CacheLayout
    from penstock.backend.passes.decoder.cuda.step.step_rows import RowArrays
    from penstock.backend.passes.decoder.ops import HeadShape

HEAD_DIM_UNIT = 32
MAX_ROWS = 32
"""kStreamRows of kernels/product_stream.cuh."""
ROW_DTYPE = torch.bfloat16
_NUM_THREADS = 256
_RING_BYTES_OF_OUTPUT = 8 * 6 * 64
"""Ring of product_stream.cuh: warps, chunks of each, bytes of a chunk."""
_OUTPUT_TILES = (32, 16)
_NUM_UNUSED = 4
_FEW_OUTPUTS = 4096
"""Below it tiles of 16 outputs: 32 would leave most of a GPU's multiprocessors without a block."""

RowLinear: TypeAlias = CudaLinear


def kernels() -> Iterator[Kernel]:
    """Yield all instantiations; see `kernel_manifest`."""
    for tile in _OUTPUT_TILES:
        yield _product("multiply_and_add", tile)
    for entry in ("weigh_rows", "multiply_and_gate", "multiply_rows"):
        yield _product(entry, _OUTPUT_TILES[0])
    for kv_dtype in KV_MACRO:
        yield _store(kv_dtype)


def scratch_bytes(hidden_size: int, heads: HeadShape) -> int:
    """Memory that `RowProducts` allocates."""
    return 4 * (MAX_ROWS * _num_parts(hidden_size) + heads.num_heads + 2 * heads.num_kv_heads + _NUM_UNUSED)


@dataclass(frozen=True, slots=True)
class WeighedRows:
    """Rows that an RMS norm lacks its factor of, which the next product finds."""

    values: Tensor
    """[n, hidden]: the residual stream times the norm's weight."""
    squares: Tensor
    """fp32 [n, parts]: sums of squares of parts of each row."""


class RowProducts:
    """The kernels for one model on one device. All methods take at most MAX_ROWS rows, and none of them allocates."""

    def __init__(
        self,
        launcher: Launcher,
        device: torch.device,
        heads: HeadShape,
        hidden_size: int,
        rotary_dim: int,
        eps: float,
        layout: CacheLayout,
    ) -> None:
        self._launcher = launcher
        self._heads = heads
        self._rotary_dim = rotary_dim
        self._eps = np.float32(eps)
        self._page_size_tokens = layout.page_size_tokens
        self._add = _product("multiply_and_add", _tile(hidden_size))
        self._weigh, self._gate, self._multiply = (
            _product(entry, _OUTPUT_TILES[0]) for entry in ("weigh_rows", "multiply_and_gate", "multiply_rows")
        )
        self._store = _store(layout.kv_dtype)
        num_heads = heads.num_heads + 2 * heads.num_kv_heads
        self._squares = torch.zeros(MAX_ROWS * _num_parts(hidden_size), device=device)
        self._tickets = torch.zeros(num_heads, dtype=torch.int32, device=device)
        self._unused = torch.zeros(_NUM_UNUSED, device=device)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels to pass to `Launcher.prepare`."""
        return self._weigh, self._add, self._gate, self._multiply, self._store

    def weigh(self, residual: Tensor, norm: Tensor, hidden: Tensor) -> WeighedRows:
        """Begin the norm of residual [n, hidden] fp32 with the weight norm [hidden], in the memory of `hidden`."""
        squares = self._squares[: len(residual)].view(-1, 1)
        self._launcher.launch(
            self._weigh, (len(residual), 1, 1), residual, norm, hidden, squares, np.int32(residual.shape[1])
        )
        return WeighedRows(hidden, squares)

    def add(self, x: Tensor, linear: RowLinear, residual: Tensor, norm: Tensor, hidden: Tensor) -> WeighedRows:
        """residual [n, hidden] fp32 += the linear of x; begin the norm of the sum as `weigh` does."""
        num_rows, outputs = residual.shape
        num_tiles = _num_parts(outputs)
        squares = self._squares[: num_rows * num_tiles].view(num_rows, num_tiles)
        self._launcher.launch(
            self._add, (num_tiles, 1, 1), x, *self._parts(linear), residual, norm, hidden, squares,
            *map(np.int32, (num_rows, outputs, x.shape[1])), *_factors(linear),
        )  # fmt: skip
        return WeighedRows(hidden, squares)

    def gate(self, rows: WeighedRows, linear: RowLinear, out: Tensor) -> None:
        """out [n, width] = silu(gate) * up of the norm's rows; the linear's outputs are [gate | up]."""
        num_rows, width = out.shape
        sizes = (num_rows, width, rows.values.shape[1], rows.squares.shape[1])
        self._launcher.launch(
            self._gate, (-(-width // (_OUTPUT_TILES[0] // 2)), 1, 1), rows.values, rows.squares, *self._parts(linear),
            out, *map(np.int32, sizes), self._eps, *_factors(linear),
        )  # fmt: skip

    def multiply(self, x: Tensor, linear: RowLinear, out: Tensor) -> Tensor:
        """out [n, outputs] = the linear of x; return out."""
        num_rows, outputs = out.shape
        self._launcher.launch(
            self._multiply, (-(-outputs // _OUTPUT_TILES[0]), 1, 1), x, *self._parts(linear), out,
            *map(np.int32, (num_rows, outputs, x.shape[1])), *_factors(linear),
        )  # fmt: skip
        return out

    def store(
        self,
        rows: WeighedRows,
        linear: RowLinear,
        qkv: Tensor,
        layer_cache: Tensor,
        page_table: Tensor,
        step_rows: RowArrays,
        rope: Tensor | None,
        norms: tuple[Tensor, Tensor] | None,
        query_rope: Tensor | None,
    ) -> None:
        """qkv [n, qkv_size] = the linear of the norm's rows of one token each, then as `Elementwise.rope_and_store`.

        In qkv, k is not normed and not rotated.
        """
        table = self._unused if rope is None else rope
        q_norm, k_norm = norms or (self._unused, self._unused)
        heads = self._heads
        sizes = (
            len(qkv), rows.values.shape[1], rows.squares.shape[1], page_table.shape[1], self._page_size_tokens,
            heads.num_heads, heads.num_kv_heads, heads.head_dim, 0 if rope is None else self._rotary_dim,
            norms is not None,
        )  # fmt: skip
        self._launcher.launch(
            self._store, (qkv.shape[1] // _OUTPUT_TILES[0], 1, 1), rows.values, rows.squares, *self._parts(linear), qkv,
            q_norm, k_norm, table if query_rope is None else query_rope, table, layer_cache, page_table,
            step_rows.context_lens, step_rows.slots, self._tickets, *map(np.int32, sizes), self._eps,
            *_factors(linear),
        )  # fmt: skip

    def _parts(self, linear: RowLinear) -> tuple[Tensor, ...]:
        """values, scales, zeros and bias; those that are missing are any tensor, which is not read."""
        weight = linear.weight
        return weight, self._unused, weight, weight if linear.bias is None else linear.bias


def _factors(linear: RowLinear) -> tuple[np.int32, np.float32, np.int32]:
    return np.int32(linear.bias is not None), np.float32(linear.scale), np.int32(0)


def _tile(outputs: int) -> int:
    return _OUTPUT_TILES[outputs < _FEW_OUTPUTS]


def _num_parts(outputs: int) -> int:
    return -(-outputs // _tile(outputs))


def _product(entry: str, tile: int) -> Kernel:
    is_product = entry != "weigh_rows"
    return Kernel(
        "row_products.cu", entry, _macros(tile), _NUM_THREADS, tile * _RING_BYTES_OF_OUTPUT * is_product, is_product
    )


def _store(kv_dtype: str) -> Kernel:
    tile = _OUTPUT_TILES[0]
    macros = (*_macros(tile), ("KV_DTYPE", KV_MACRO[kv_dtype]))
    return Kernel("qkv_product.cu", "multiply_and_store", macros, _NUM_THREADS, tile * _RING_BYTES_OF_OUTPUT, True)


def _macros(tile: int) -> tuple[tuple[str, int], ...]:
    return ("ACT", ACT_MACRO[ROW_DTYPE]), ("WEIGHT", 16), ("TILE_OUTPUTS", tile)
