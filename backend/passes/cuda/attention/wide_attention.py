"""Attention of layers whose heads are wider than those of the other layers (kernels/decode/wide_attention.cu).

It reads a token's keys and values once for each query head, without tensor cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from penstock.backend.passes.cuda.attention.kernel_limits import check_logits
from penstock.backend.passes.cuda.attention.step_attention import StepAttention
from penstock.backend.passes.cuda.device.device import Device
from penstock.backend.passes.cuda.device.launcher import ACT_MACRO, Kernel, Launcher, int32
from penstock.backend.passes.cuda.device.transfers import Ints
from penstock.backend.passes.cuda.memory.cache_layout import KV_MACRO, CacheLayout
from penstock.backend.passes.cuda.step.step_rows import CudaStep, RowArrays
from penstock.backend.passes.ops.interface import KV_BLOCK_VALUES

MAX_HEAD_DIM = 512


def kernels() -> Iterator[Kernel]:
    """Yield all instantiations; see `kernel_manifest`."""
    for act in ACT_MACRO.values():
        yield from (_kernel(act, kv_dtype) for kv_dtype in KV_MACRO)


def _kernel(act: int, kv_dtype: str) -> Kernel:
    return Kernel("decode/wide_attention.cu", "wide_attention", (("ACT", act), ("KV_DTYPE", KV_MACRO[kv_dtype])), 256)


@dataclass(slots=True)
class WideAttention:
    """Implements `StepAttention`. It reads rows on the device, and needs no tiles: those are of the other layers."""

    layout: CacheLayout
    num_heads: int
    scale: float
    softcap: float
    others: StepAttention
    act: int
    """The activations' `ACT_MACRO`."""
    workspace_bytes: int = 0
    _launcher: Launcher = field(init=False)

    def __post_init__(self) -> None:
        """Raises ValueError for what the kernel does not support."""
        check_logits(self.scale, 0, self.softcap)
        head_dim, num_kv_heads = self.layout.head_dim, self.layout.num_kv_heads
        if head_dim % KV_BLOCK_VALUES or head_dim > MAX_HEAD_DIM:
            raise ValueError(
                f"heads of full attention have {head_dim} values; they must be a multiple of {KV_BLOCK_VALUES}, "
                f"at most {MAX_HEAD_DIM}"
            )
        if self.num_heads % num_kv_heads:
            raise ValueError(f"{self.num_heads} heads of full attention share {num_kv_heads} KV heads")

    def kernels(self) -> Iterator[Kernel]:
        yield _kernel(self.act, self.layout.kv_dtype)

    def open(self, device: Device) -> None:
        self._launcher = device.launcher

    def tiles(self, query_starts: Ints, context_lens: Ints, num_decode: int, visible_ends: Ints | None) -> Ints:
        return self.others.tiles(query_starts, context_lens, num_decode, visible_ends)

    def captured_tiles(self, num_tokens: int) -> int:
        return self.others.captured_tiles(num_tokens)

    def begin(self, decode_rows: RowArrays) -> None:
        """Do nothing: the layers share no work."""

    def attend(
        self,
        qkv: Tensor,
        layer_cache: Tensor,
        page_table: Tensor,
        step: CudaStep,
        sinks: Tensor,  # noqa: ARG002 - no model with such layers has any
        out: Tensor,
    ) -> None:
        self.launch(self._launcher, qkv, layer_cache, page_table, step.rows, out)

    def launch(
        self, launcher: Launcher, qkv: Tensor, layer_cache: Tensor, page_table: Tensor, rows: RowArrays, out: Tensor
    ) -> None:
        """Write out [T, num_heads * head_dim]; qkv [T, any number of heads * head_dim] begins with the queries."""
        layout = self.layout
        sizes = layout.page_size_tokens, qkv.shape[1] // layout.head_dim, layout.num_kv_heads, layout.head_dim
        launcher.launch(
            _kernel(self.act, layout.kv_dtype), (len(qkv), self.num_heads, 1), out, qkv, layer_cache, page_table,
            rows.query_starts, rows.context_lens, rows.slots, int32(len(rows.slots)), int32(page_table.shape[1]),
            *map(int32, sizes), np.float32(self.scale), np.float32(self.softcap),
        )  # fmt: skip
