"""Attention of whole rows in both directions, as encoders need it. Keys and values are the step's own: no cache.

A row's output depends on that row alone, bit for bit (kernels/prefill/encoder_attention.cu).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.backend.passes.cuda.attention.prefill_attention import cut_tiles, query_rows, shared_bytes
from penstock.backend.passes.cuda.device.kernel_choices import CONSTANTS, KernelChoices
from penstock.backend.passes.cuda.device.launcher import Kernel, Launcher
from penstock.backend.passes.cuda.memory.cache_layout import KV_MACRO

MAX_HEAD_DIM = 128
_HEAD_UNIT = 8
PUBLISHED_HEAD_DIMS = (32, 64, 128)
"""Head sizes of nearly all published encoders, whose kernels are listed; others are compiled when they are needed."""
_SMALL_TILES = replace(CONSTANTS, query_rows=64)
"""Beyond heads of 64 values larger tiles spill registers."""
DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
"""Supported dtypes of queries, keys and values, and their names."""


def kernels() -> Iterator[Kernel]:
    """Yield every instantiation."""
    for dtype in DTYPES:
        for head_dim in PUBLISHED_HEAD_DIMS:
            yield _kernel(dtype, head_dim)


@dataclass(frozen=True, slots=True)
class EncoderAttention:
    """Attention of an encoder's layers. Raises ValueError for what no kernel supports."""

    num_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float

    kernel: Kernel = field(init=False)

    def __post_init__(self) -> None:
        if (reason := unsupported_head(self.head_dim)) is not None:
            raise ValueError(reason)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype}; it must be one of {', '.join(DTYPES.values())}")
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale is {self.scale}; it must be finite and above 0")
        object.__setattr__(self, "kernel", _kernel(self.dtype, self.head_dim))

    def tiles(self, row_starts: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the tiles [n, 2] of a step: (row, first token of the tile within its row). n is at most R + T // 64.

        Raises ValueError if a launch cannot have that many tiles.
        """
        contexts = np.zeros(len(row_starts) - 1, np.int32)
        num_rows = query_rows(DTYPES[self.dtype], self.head_dim, _choices(self.head_dim))
        return cut_tiles(row_starts, contexts, 1, num_rows)

    def attend(
        self,
        launcher: Launcher,
        qkv: Tensor,
        row_starts: Tensor,
        tiles: Tensor,
        out: Tensor,
        *,
        window: int | None = None,
        biases: Tensor | None = None,
    ) -> None:
        """Write out [T, num_heads * head_dim] from qkv [T, 3 * num_heads * head_dim], both of the same dtype.

        row_starts int32 [R + 1]; tiles int32 in any shape, the result of `tiles`. window: tokens to each side, or None
        for all. biases: as `LayerAttention.relative_bias`, at least as long as the longest row.
        """
        if not out.dtype == qkv.dtype == self.dtype:
            raise ValueError(f"queries are {qkv.dtype} and the output is {out.dtype}; both must be {self.dtype}")
        reach = 0 if biases is None else (biases.shape[1] + 1) // 2
        if biases is None:
            biases = qkv.new_empty(1, dtype=torch.float32)  # not read
        launcher.launch(
            self.kernel,
            (self.num_heads, tiles.numel() // 2, 1),
            out,
            qkv,
            row_starts,
            tiles,
            biases,
            np.int32(reach),
            np.int32(-1 if window is None else window),
            np.float32(self.scale),
        )


def _kernel(dtype: torch.dtype, head_dim: int) -> Kernel:
    name = DTYPES[dtype]
    macros: tuple[tuple[str, int], ...] = (("KV_DTYPE", KV_MACRO[name]), ("HEAD_DIM", head_dim))
    choices = _choices(head_dim)
    num_bytes = shared_bytes(name, -(-head_dim // 16) * 16, choices)
    if name == "fp32":
        return Kernel("prefill/encoder_attention_fp32.cu", "encoder_attention_fp32", macros, 256, num_bytes)
    if choices != CONSTANTS:
        macros = (*macros, ("QUERY_ROWS", choices.query_rows))
    return Kernel("prefill/encoder_attention.cu", "encoder_attention", macros, 128, num_bytes)


def _choices(head_dim: int) -> KernelChoices:
    return CONSTANTS if head_dim <= 64 else _SMALL_TILES


def unsupported_head(head_dim: int) -> str | None:
    """Return why no kernel supports the size, or None."""
    if head_dim % _HEAD_UNIT == 0 and 0 < head_dim <= MAX_HEAD_DIM:
        return None
    return f"head_dim is {head_dim}; it must be a multiple of {_HEAD_UNIT}, at most {MAX_HEAD_DIM}"
