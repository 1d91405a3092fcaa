"""Products of a step of few rows, with everything between them in a layer: five kernels a layer, including attention.

Weights stream through shared memory and begin before the kernel's input exists. A row's bits do not depend on the other
rows. Activations are bf16; weights are too, or they have 8 bits and are widened in registers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from penstock.backend.checkpoint.weight_forms.float8_weight import FLOAT8_GROUP_SIZE, Float8Form
from penstock.backend.checkpoint.weight_forms.quantized_forms import PackedForm
from penstock.backend.passes.cuda.device.launcher import ACT_MACRO, Kernel, Launcher, int32
from penstock.backend.passes.cuda.memory.cache_layout import KV_MACRO, CacheLayout
from penstock.backend.passes.cuda.ops.matmul import CudaLinear
from penstock.backend.passes.cuda.ops.packed_weights import CudaQuantizedLinear, KernelForm
from penstock.backend.passes.cuda.ops.quantized_linear import form_macros
from penstock.backend.passes.cuda.step.step_rows import RowArrays
from penstock.backend.passes.ops.interface import HeadShape

HEAD_DIM_UNIT = 32
MAX_ROWS = 32
"""kStreamRows of kernels/products/product_stream.cuh."""
ROW_DTYPE = torch.bfloat16
_NUM_THREADS = 256
_RING_BYTES_OF_OUTPUT = 8 * 6 * 64
"""Ring of product_stream.cuh: warps, chunks of each, bytes of a chunk."""
_OUTPUT_TILES = (32, 16)
_NUM_UNUSED = 4
_CLAIMING_ROWS = 8
"""kStreamRows of kernels whose blocks claim tiles."""
_SUMS_BYTES = 2 * 8 * _CLAIMING_ROWS * (16 + 4) * 4
"""Their sums of two tiles: warps, rows, outputs and a gap, fp32."""
CLAIMING_BLOCKS = 2
"""Of a multiprocessor."""
_CHUNKS_AHEAD = 5
"""Chunks of each warp that are under way; such a kernel needs as many of a tile's."""
_FEW_OUTPUTS = 4096
"""Below it tiles have 16 outputs: 32 would leave most of a GPU's multiprocessors without a block."""
_FEW_ROWS = 4
"""Up to it q, k, v, gate and up have tiles of 16 outputs: three blocks fit a multiprocessor instead of two, so the last
wave of blocks fills a GPU better. More rows would read the rows too often."""

RowLinear: TypeAlias = CudaLinear | CudaQuantizedLinear
RowForm: TypeAlias = KernelForm | None
"""The form of a linear's weights; None for bf16."""
ROW_FORMS: tuple[RowForm, ...] = (None, PackedForm(None), Float8Form(None), Float8Form(FLOAT8_GROUP_SIZE))
"""Forms with four bits are left to `QuantizedProducts`: widening them takes longer than reading them."""


def kernels() -> Iterator[Kernel]:
    """Yield all instantiations; see `kernel_manifest`."""
    yield _WEIGH
    for form in ROW_FORMS:
        yield _product("multiply_rows", _OUTPUT_TILES[0], form)
        yield from _claiming(form)
        for tile in _OUTPUT_TILES:
            yield _product("multiply_and_add", tile, form)
            yield _product("multiply_and_gate", tile, form)
            for kv_dtype in KV_MACRO:
                yield _store(kv_dtype, tile, form)


def form_of(linear: RowLinear) -> RowForm:
    return linear.form if isinstance(linear, CudaQuantizedLinear) else None


def scratch_bytes(hidden_size: int, heads: HeadShape) -> int:
    """Memory that `RowProducts` allocates."""
    return 4 * (MAX_ROWS * _num_parts(hidden_size) + heads.num_heads + 2 * heads.num_kv_heads + 1 + _NUM_UNUSED)


@dataclass(frozen=True, slots=True)
class WeighedRows:
    """Rows that lack the factor of an RMS norm, which the next product computes."""

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
        claiming_blocks: int = 0,
        *,
        ropes_by_token: bool = False,
    ) -> None:
        """claiming_blocks: with few rows, so many blocks claim the tiles of gate and up, and of logits; 0: none do.
        ropes_by_token: as of `Elementwise`."""
        self._launcher = launcher
        self._claiming_blocks = claiming_blocks
        self._claims = torch.zeros(1, dtype=torch.int32, device=device)
        self._heads = heads
        self._rotary_dim = rotary_dim
        self._ropes_by_token = ropes_by_token
        self._eps = np.float32(eps)
        self._page_size_tokens = layout.page_size_tokens
        self._tile = _tile(hidden_size)
        self._kv_dtype = layout.kv_dtype
        num_heads = heads.num_heads + 2 * heads.num_kv_heads
        self._squares = torch.zeros(MAX_ROWS * _num_parts(hidden_size), device=device)
        self._tickets = torch.zeros(num_heads, dtype=torch.int32, device=device)
        self._unused = torch.zeros(_NUM_UNUSED, device=device)

    def kernels(self, forms: Iterable[RowForm]) -> Iterator[Kernel]:
        """Yield the kernels to pass to `Launcher.prepare`, for linears of these forms."""
        yield _WEIGH
        for form in forms:
            yield _product("multiply_and_add", self._tile, form)
            yield _product("multiply_rows", _OUTPUT_TILES[0], form)
            if self._claiming_blocks:
                yield from _claiming(form)
            for tile in _OUTPUT_TILES:
                yield _product("multiply_and_gate", tile, form)
                yield _store(self._kv_dtype, tile, form)

    def weigh(self, residual: Tensor, norm: Tensor, hidden: Tensor) -> WeighedRows:
        """Begin the norm of residual [n, hidden] fp32 with the weight norm [hidden], in the memory of `hidden`."""
        squares = self._squares[: len(residual)].view(-1, 1)
        self._launcher.launch(
            _WEIGH, (len(residual), 1, 1), residual, norm, hidden, squares, np.int32(residual.shape[1])
        )
        return WeighedRows(hidden, squares)

    def add(self, x: Tensor, linear: RowLinear, residual: Tensor, norm: Tensor, hidden: Tensor) -> WeighedRows:
        """residual [n, hidden] fp32 += the linear of x; begin the norm of the sum as `weigh` does."""
        num_rows, outputs = residual.shape
        num_tiles = _num_parts(outputs)
        squares = self._squares[: num_rows * num_tiles].view(num_rows, num_tiles)
        kernel = _product("multiply_and_add", self._tile, form_of(linear))
        self._launcher.launch(
            kernel, (num_tiles, 1, 1), x, *self._parts(linear), residual, norm, hidden, squares,
            *map(int32, (num_rows, outputs, x.shape[1])), *_factors(linear),
        )  # fmt: skip
        return WeighedRows(hidden, squares)

    def gate(self, rows: WeighedRows, linear: RowLinear, out: Tensor) -> None:
        """out [n, width] = silu(gate) * up of the norm's rows; the linear's outputs are [gate | up]."""
        num_rows, width = out.shape
        sizes = (num_rows, width, rows.values.shape[1], rows.squares.shape[1])
        tile = _OUTPUT_TILES[num_rows <= _FEW_ROWS]
        kernel, num_blocks = self._tiles("multiply_and_gate", rows.values, linear, tile, 2 * width)
        self._launcher.launch(
            kernel, (num_blocks, 1, 1), rows.values, rows.squares, *self._parts(linear),
            out, *map(int32, sizes), self._eps, self._claims, *_factors(linear),
        )  # fmt: skip

    def multiply(self, x: Tensor, linear: RowLinear, out: Tensor) -> Tensor:
        """out [n, outputs] = the linear of x; return out."""
        num_rows, outputs = out.shape
        kernel, num_blocks = self._tiles("multiply_rows", x, linear, _OUTPUT_TILES[0], outputs)
        self._launcher.launch(
            kernel, (num_blocks, 1, 1), x, *self._parts(linear), out,
            *map(int32, (num_rows, outputs, x.shape[1])), self._claims, *_factors(linear),
        )  # fmt: skip
        return out

    def _tiles(self, entry: str, x: Tensor, linear: RowLinear, tile: int, outputs: int) -> tuple[Kernel, int]:
        """The kernel for rows x, and its number of blocks: one for each tile, or as many as claim tiles."""
        form, (num_rows, inputs) = form_of(linear), x.shape
        warp_inputs = 8 * (32 if form is None else 64)  # of a chunk of each warp
        if self._claiming_blocks and num_rows <= _FEW_ROWS and inputs // warp_inputs >= _CHUNKS_AHEAD:
            tile = _OUTPUT_TILES[1]
            return _product(entry, tile, form, claims=True), min(self._claiming_blocks, -(-outputs // tile))
        return _product(entry, tile, form), -(-outputs // tile)

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
            norms is not None, self._ropes_by_token,
        )  # fmt: skip
        tile = _OUTPUT_TILES[len(qkv) <= _FEW_ROWS]
        kernel = _store(self._kv_dtype, tile, form_of(linear))
        self._launcher.launch(
            kernel, (qkv.shape[1] // tile, 1, 1), rows.values, rows.squares, *self._parts(linear), qkv,
            q_norm, k_norm, table if query_rope is None else query_rope, table, layer_cache, page_table,
            step_rows.context_lens, step_rows.slots, self._tickets, *map(int32, sizes), self._eps,
            *_factors(linear),
        )  # fmt: skip

    def _parts(self, linear: RowLinear) -> tuple[Tensor, ...]:
        """values, scales, zeros and bias. Missing ones are any tensor, which is not read."""
        if isinstance(linear, CudaQuantizedLinear):
            parts = linear.parts
        else:
            parts = linear.weight, self._unused, linear.weight
        return *parts, parts[0] if linear.bias is None else linear.bias


def _factors(linear: RowLinear) -> tuple[np.int32, np.float32, np.int32]:
    """The arguments has_bias, scale and blocks."""
    blocks = linear.blocks if isinstance(linear, CudaQuantizedLinear) else 0
    return int32(linear.bias is not None), np.float32(linear.scale), int32(blocks)


def _tile(outputs: int) -> int:
    return _OUTPUT_TILES[outputs < _FEW_OUTPUTS]


def _num_parts(outputs: int) -> int:
    return -(-outputs // _tile(outputs))


@cache
def _product(entry: str, tile: int, form: RowForm, *, claims: bool = False) -> Kernel:
    macros, num_bytes = _macros(tile, form), tile * _RING_BYTES_OF_OUTPUT
    if claims:
        macros, num_bytes = (*macros, ("STREAM_ROWS", _CLAIMING_ROWS)), num_bytes + _SUMS_BYTES
    return Kernel("products/row_products.cu", entry, macros, _NUM_THREADS, num_bytes, True)


def _claiming(form: RowForm) -> Iterator[Kernel]:
    for entry in ("multiply_rows", "multiply_and_gate"):
        yield _product(entry, _OUTPUT_TILES[1], form, claims=True)


@cache
def _store(kv_dtype: str, tile: int, form: RowForm) -> Kernel:
    macros = (*_macros(tile, form), ("KV_DTYPE", KV_MACRO[kv_dtype]))
    return Kernel(
        "products/qkv_product.cu", "multiply_and_store", macros, _NUM_THREADS, tile * _RING_BYTES_OF_OUTPUT, True
    )


def _macros(tile: int, form: RowForm) -> tuple[tuple[str, int], ...]:
    of_form = (("WEIGHT", 16),) if form is None else form_macros(form)
    return ("ACT", ACT_MACRO[ROW_DTYPE]), *of_form, ("TILE_OUTPUTS", tile)


_WEIGH = Kernel("products/row_products.cu", "weigh_rows", _macros(_OUTPUT_TILES[0], None), _NUM_THREADS)
