"""Attention of rows of one token over their paged keys and values.

`plan`, once per step and window, cuts the rows' contexts into chunks and lists them. `attend`, once per layer, works
through the list with as many blocks as the device runs at a time. Both read lengths on the device, so one captured
graph serves all steps of a padded number of rows. A row's output depends only on the row, unless
`KernelChoices.chunk_levels` cuts it by the length of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock.backend.passes.cuda.attention.kernel_limits import (
    HEAD_DIMS,
    MAX_CONTEXT_TOKENS,
    check_logits,
    check_shape,
    require,
)
from penstock.backend.passes.cuda.device.kernel_choices import CONSTANTS, KernelChoices
from penstock.backend.passes.cuda.device.launcher import ACT_MACRO, Grid, Kernel, Launcher, int32
from penstock.backend.passes.cuda.memory.cache_layout import KV_MACRO, CacheLayout
from penstock.backend.passes.ops.interface import supports_q8_0

NUM_WARPS = 4
"""Warps of a block. They take a chunk's tiles in turn."""
NUMBER_BYTES = {"fp32": 4, "bf16": 2, "q8_0": 1, "fp8": 1}
"""Bytes of a key's or value's number, without scales."""
_BLOCKS_TO_FILL_A_DEVICE = 256
_FEWEST_CHUNKS = 16


def tile_tokens(kv_dtype: str) -> int:
    """Return kTileTokens of kernels/decode/decode_tiles.cuh."""
    return 32 // NUMBER_BYTES[kv_dtype]


def most_chunks(num_kv_heads: int) -> int:
    """Return the most chunks of a row: enough to fill a device with one long row."""
    return max(_FEWEST_CHUNKS, -(-_BLOCKS_TO_FILL_A_DEVICE // num_kv_heads))


def chunk_tokens(num_tokens: int, num_kv_heads: int, shortest: int) -> int:
    """Return the tokens of a row's chunks: shortest, doubled until there are at most `most_chunks`."""
    found = shortest
    while -(-num_tokens // found) > most_chunks(num_kv_heads):
        found *= 2
    return found


_FIRST_MULTIPLE_TOKENS = 16
"""The first chunk of a window begins at a multiple of this many tokens."""
_MAX_ROWS = (1 << 16) - 1
"""Most rows. The sampler's grids have a row in their second dimension, which CUDA limits."""
_MAX_SMS = 1 << 12
_PLAN_THREADS = 512
_FULL_ITEMS_OF_BLOCK = 3.9
"""Chunks of one head that a block has in a step which fills the device."""
SM_SHARED_BYTES = (100 << 10, 164 << 10, 228 << 10)
"""Shared memory of a multiprocessor: of sm_86, sm_89 and sm_120; of sm_80; of sm_90 and sm_100."""
_RESERVED_SHARED_BYTES = 1024
"""Shared memory that CUDA reserves in each block."""
_ACTS = {dtype: np.int32(value) for dtype, value in ACT_MACRO.items()}


PLAN = Kernel("decode/decode_plan.cu", "plan_decode", (("NUM_THREADS", _PLAN_THREADS),), _PLAN_THREADS)


def kernels() -> Iterator[Kernel]:
    """Yield every instantiation for devices with SM_SHARED_BYTES."""
    yield PLAN
    for kv_dtype in KV_MACRO:
        for head_dim in HEAD_DIMS:
            if kv_dtype != "q8_0" or supports_q8_0(head_dim):
                rings = (_ring(kv_dtype, head_dim, shared_bytes)[0] for shared_bytes in SM_SHARED_BYTES)
                yield from (_attention(kv_dtype, head_dim, ring_tiles) for ring_tiles in dict.fromkeys(rings))


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Lives as long as the model. One step at a time uses it; the layers run in order on one stream."""

    items: Tensor
    """int32 [max_rows * max_chunks, 4]: row, slot, context length, chunk."""
    plan: Tensor
    """int32 [2]: the number of items, and the tokens of the shortest chunk."""
    partial_out: Tensor
    """fp32 [max_rows, num_heads, max_chunks, head_dim]."""
    partial_peaks: Tensor
    """fp32 [max_rows, num_heads, max_chunks, 2]."""
    tickets: Tensor
    """int32 [max_rows, num_kv_heads]; counts a row's finished chunks, and is 0 between launches."""
    claims: Tensor
    """int32 [2]; counts claimed chunks and ended blocks, and is 0 between launches."""


class DecodeAttention:
    """Attention of all layers that have the same window. Immutable."""

    def __init__(
        self,
        layout: CacheLayout,
        num_heads: int,
        scale: float,
        *,
        max_rows: int,
        max_context_tokens: int,
        num_sms: int,
        shared_bytes_per_sm: int,
        window_tokens: int = 0,
        softcap: float = 0.0,
        choices: KernelChoices = CONSTANTS,
    ) -> None:
        """scale multiplies q · k. softcap, unless 0, bounds the logits: cap · tanh(logit / cap). A token sees itself
        and the window_tokens - 1 tokens before it, or all tokens if window_tokens is 0. num_sms and shared_bytes_per_sm
        are the device's. Raises ValueError for what no kernel supports.
        """
        check_shape(layout, num_heads)
        require("max_rows", max_rows, 1, _MAX_ROWS)
        require("max_context_tokens", max_context_tokens, 1, MAX_CONTEXT_TOKENS)
        require("num_sms", num_sms, 1, _MAX_SMS)
        check_logits(scale, window_tokens, softcap)
        self.layout = layout
        self.num_heads = num_heads
        self.scale = scale
        self.softcap = softcap
        self.max_rows = max_rows
        self.window_tokens = window_tokens
        has_levels = bool(choices.chunk_levels) and not window_tokens
        shortest = choices.chunk_tokens // 2 if has_levels else choices.chunk_tokens
        self.max_chunks = _max_chunks(max_context_tokens, window_tokens, layout.num_kv_heads, shortest)
        """Most chunks per row. A chunk has the step's fewest tokens; longer rows double that until their chunks are at
        most this."""
        ring_tiles, blocks_per_sm = _ring(layout.kv_dtype, layout.head_dim, shared_bytes_per_sm, choices.ring_tiles)
        self.kernel = _attention(layout.kv_dtype, layout.head_dim, ring_tiles, choices)
        num_blocks = min(num_sms * blocks_per_sm, max_rows * self.max_chunks * layout.num_kv_heads)
        self._grid: Grid = (num_blocks, 1, 1)
        full_items = int(_FULL_ITEMS_OF_BLOCK * num_sms * blocks_per_sm / layout.num_kv_heads) + 1 if has_levels else 0
        window = (np.int32(window_tokens), np.int32(self.max_chunks))
        self._plan_scalars = (np.int32(choices.chunk_tokens), np.int32(full_items), *window)
        self._scalars = (
            np.int32(num_heads // layout.num_kv_heads),
            np.int32(layout.num_kv_heads),
            np.int32(layout.page_size_tokens.bit_length() - 1),
            *window,
            np.float32(scale),
            np.float32(softcap),
        )

    def kernels(self) -> tuple[Kernel, ...]:
        return PLAN, self.kernel

    @property
    def workspace_bytes(self) -> int:
        """16 bytes per chunk of a row, and head_dim + 2 fp32 numbers per chunk and head. max_chunks is at most
        max(16, 256 / KV heads), so this is at most about 1 KB · max_rows · group · (head_dim + 2)."""
        rows, heads, chunks = self.max_rows, self.num_heads, self.max_chunks
        per_row = chunks * (16 + heads * (self.layout.head_dim + 2) * 4) + self.layout.num_kv_heads * 4
        return rows * per_row + 16

    def make_workspace(self, device: str | torch.device) -> DecodeWorkspace:
        rows, heads, chunks = self.max_rows, self.num_heads, self.max_chunks

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return DecodeWorkspace(
            items=zeros(rows * chunks, 4, dtype=torch.int32),
            plan=zeros(2, dtype=torch.int32),
            partial_out=zeros(rows, heads, chunks, self.layout.head_dim, dtype=torch.float32),
            partial_peaks=zeros(rows, heads, chunks, 2, dtype=torch.float32),
            tickets=zeros(rows, self.layout.num_kv_heads, dtype=torch.int32),
            claims=zeros(2, dtype=torch.int32),
        )

    def plan(
        self, launcher: Launcher, workspace: DecodeWorkspace, context_lens: Tensor, slots: Tensor, num_rows: int
    ) -> None:
        """List the chunks of the first num_rows rows, of one token each. Call before the step's first `attend`.

        context_lens, slots: int32 [at least num_rows]. A row attends to context_lens[row] + 1 tokens, at most
        max_context_tokens. A row whose slot is -1 is skipped.
        """
        if num_rows > min(self.max_rows, len(context_lens), len(slots)):
            raise ValueError(
                f"{num_rows} rows; at most {min(self.max_rows, len(context_lens), len(slots))} are allowed"
            )
        arguments = (context_lens, slots, workspace.items, workspace.plan)
        launcher.launch(PLAN, (1, 1, 1), *arguments, int32(num_rows), *self._plan_scalars)

    def attend(
        self,
        launcher: Launcher,
        workspace: DecodeWorkspace,
        qkv: Tensor,
        layer_cache: Tensor,
        page_table: Tensor,
        sinks: Tensor,
        out: Tensor,
    ) -> None:
        """Write out[r] for the queries qkv[r] of each planned row r; other rows of out do not change.

        qkv [T, (num_heads + 2 num_kv_heads) * head_dim] and out [T, num_heads * head_dim] have the same dtype: fp32,
        bf16 or fp16. layer_cache: uint8, the layer's pages. page_table: int32 [max_slots, max_pages]. sinks: fp32
        [num_heads], a score of each head that takes part in the softmax and has no value; -inf for none.
        """
        act = _ACTS[qkv.dtype]
        if out.dtype != qkv.dtype:
            raise ValueError(f"queries are {qkv.dtype}, but the output is {out.dtype}; they must be the same")
        launcher.launch(
            self.kernel,
            self._grid,
            qkv,
            layer_cache,
            page_table,
            workspace.items,
            workspace.plan,
            workspace.partial_out,
            workspace.partial_peaks,
            workspace.tickets,
            workspace.claims,
            sinks,
            out,
            act,
            int32(page_table.shape[1]),
            *self._scalars,
        )


def _max_chunks(max_context_tokens: int, window_tokens: int, num_kv_heads: int, chunk_tokens: int) -> int:
    """Return enough chunks to fill a device with one long row, or fewer if no context is that long.

    The smaller number does not change how a row is cut.
    """
    longest = max_context_tokens
    if window_tokens:
        longest = min(longest, window_tokens + _FIRST_MULTIPLE_TOKENS - 1)
    return min(most_chunks(num_kv_heads), -(-longest // chunk_tokens))


def _tile_bytes(kv_dtype: str, head_dim: int) -> int:
    """Return kTileBytes of kernels/decode/decode_tiles.cuh."""
    number_bytes = NUMBER_BYTES[kv_dtype]
    pieces = head_dim * number_bytes // 16
    stride = pieces + (12 - pieces % 8) % 8 if kv_dtype == "fp32" else pieces | 1
    scale_row_bytes = head_dim // 32 * 2 if kv_dtype == "q8_0" else 0
    return tile_tokens(kv_dtype) * (16 * stride + scale_row_bytes)


def _static_shared_bytes(kv_dtype: str, head_dim: int) -> int:
    """Return an upper bound of the kernel's static shared memory."""
    if kv_dtype == "fp32":
        return 16 * head_dim * 4 + 3072
    return 1024 + (8192 if head_dim > 128 else 0)


def _attention(kv_dtype: str, head_dim: int, ring_tiles: int, choices: KernelChoices = CONSTANTS) -> Kernel:
    rings = NUM_WARPS * ring_tiles * _tile_bytes(kv_dtype, head_dim)
    macros = (
        ("KV_DTYPE", KV_MACRO[kv_dtype]),
        ("HEAD_DIM", head_dim),
        ("NUM_WARPS", NUM_WARPS),
        ("RING_TILES", ring_tiles),
    )
    return Kernel(
        "decode/decode_attention.cu", "decode_attention", macros, 32 * NUM_WARPS, rings, is_dependent=True,
        carveout_percent=choices.carveout_percent,
    )  # fmt: skip


def _ring(
    kv_dtype: str, head_dim: int, shared_bytes_per_sm: int, most_tiles: int = CONSTANTS.ring_tiles
) -> tuple[int, int]:
    """Return the tiles per ring and the blocks per SM: two blocks if both can have rings of three tiles, else one."""
    static_bytes = _static_shared_bytes(kv_dtype, head_dim)
    for num_blocks in (2, 1):
        free_bytes = shared_bytes_per_sm // num_blocks - _RESERVED_SHARED_BYTES - static_bytes
        ring_tiles = min(free_bytes // (NUM_WARPS * _tile_bytes(kv_dtype, head_dim)), most_tiles)
        if ring_tiles >= (3 if num_blocks == 2 else 2):
            return ring_tiles, num_blocks
    raise ValueError(
        f"{shared_bytes_per_sm} bytes of shared memory per SM are too few for {kv_dtype} heads of {head_dim}"
    )
