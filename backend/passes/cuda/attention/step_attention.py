"""Attention of a whole step in the layers of one window: chooses the kernel for each row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
from penstock.backend.passes.cuda.attention.decode_attention import DecodeAttention
from penstock.backend.passes.cuda.attention.kernel_limits import require
from penstock.backend.passes.cuda.attention.prefill_attention import MAX_TILES, PrefillAttention
from penstock.backend.passes.cuda.attention.prefill_segments import WorkspaceSizes, whole_tiles
from penstock.backend.passes.cuda.device.device import Device
from penstock.backend.passes.cuda.device.launcher import Kernel
from penstock.backend.passes.cuda.device.transfers import Ints
from penstock.backend.passes.cuda.step.step_rows import CudaStep, RowArrays


def layer_windows(config: DecoderConfig) -> tuple[int | None, ...]:
    """Return each layer's window in tokens."""
    return config.layer_window_tokens or (None,) * config.num_layers


class StepAttention(Protocol):
    """Call `open` first; then `begin` once per step with decode rows, and `attend` once per layer."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes that `open` allocates."""

    def kernels(self) -> Iterator[Kernel]:
        """Yield the kernels to pass to `Launcher.prepare`."""

    def open(self, device: Device) -> None: ...

    def tiles(self, query_starts: Ints, context_lens: Ints, num_decode: int, visible_ends: Ints | None) -> Ints:
        """Return `CudaStep.prefill_tiles` of a step in which some rows have several tokens, or no logits. Its first
        num_decode rows have one token. See `PrefillAttention.tiles`."""

    def captured_tiles(self, num_tokens: int) -> int:
        """Return the most tiles of a captured step of num_tokens. A step that has more is not captured."""

    def begin(self, decode_rows: RowArrays) -> None:
        """Prepare a step with `CudaStep.decode_rows`, at least one. A slot of -1 is padding."""

    def attend(
        self, qkv: Tensor, layer_cache: Tensor, page_table: Tensor, step: CudaStep, sinks: Tensor, out: Tensor
    ) -> None:
        """Write out for each token of the step; see `PrefillAttention.attend`. Padding rows of out do not change."""


class TwoKernelAttention:
    """Implements `StepAttention`. Rows of one token use the decode kernel, the others the prefill kernel.

    A token's last bits may therefore differ between a row of one token and a longer row.
    """

    def __init__(self, decode: DecodeAttention, prefill: PrefillAttention, sizes: WorkspaceSizes) -> None:
        self._decode = decode
        self._prefill = prefill
        self._prefill_sizes = sizes

    @property
    def workspace_bytes(self) -> int:
        return self._decode.workspace_bytes + self._prefill_sizes.num_bytes

    def kernels(self) -> Iterator[Kernel]:
        yield from self._decode.kernels()
        yield from self._prefill.kernels()

    def open(self, device: Device) -> None:
        self._launcher = device.launcher
        self._workspace = self._decode.make_workspace(device.torch_device)
        self._prefill_workspace = self._prefill_sizes.make(device.torch_device)

    def tiles(self, query_starts: Ints, context_lens: Ints, num_decode: int, visible_ends: Ints | None) -> Ints:
        return self._prefill.tiles(query_starts, context_lens, num_decode, visible_ends)

    def captured_tiles(self, num_tokens: int) -> int:
        return self._prefill.captured_tiles(num_tokens)

    def begin(self, decode_rows: RowArrays) -> None:
        rows = decode_rows
        self._decode.plan(self._launcher, self._workspace, rows.context_lens, rows.slots, len(rows.slots))

    def attend(
        self, qkv: Tensor, layer_cache: Tensor, page_table: Tensor, step: CudaStep, sinks: Tensor, out: Tensor
    ) -> None:
        if step.decode_rows.slots.shape[0]:
            self._decode.attend(self._launcher, self._workspace, qkv, layer_cache, page_table, sinks, out)
        if step.prefill_tiles is not None:
            self._prefill.attend(
                self._launcher, self._prefill_workspace, qkv, layer_cache, page_table, step.rows, step.prefill_tiles,
                sinks, out, step.visible_ends,
            )  # fmt: skip


class OneKernelAttention:
    """Implements `StepAttention`. All rows use the prefill kernel, so a token's bits do not depend on the row it is in.

    A row of one token is one tile, so the tiles are the same in every step in which all rows have one token.
    """

    def __init__(self, prefill: PrefillAttention, sizes: WorkspaceSizes, max_rows: int) -> None:
        """Raises ValueError if a launch cannot have max_rows tiles."""
        require("max_rows", max_rows, 1, MAX_TILES)
        self._prefill = prefill
        self._sizes = sizes
        self._max_rows = max_rows

    @property
    def workspace_bytes(self) -> int:
        return 4 * 4 * self._max_rows + self._sizes.num_bytes

    def kernels(self) -> Iterator[Kernel]:
        yield from self._prefill.kernels()

    def open(self, device: Device) -> None:
        self._launcher = device.launcher
        rows = np.arange(self._max_rows, dtype=np.int32)
        tiles = torch.from_numpy(whole_tiles(np.stack([rows, np.zeros_like(rows)], axis=1)))
        self._one_token_tiles = tiles.to(device.torch_device)
        self._workspace = self._sizes.make(device.torch_device)

    def tiles(
        self,
        query_starts: Ints,
        context_lens: Ints,
        num_decode: int,  # noqa: ARG002 - they have tiles too
        visible_ends: Ints | None,
    ) -> Ints:
        return self._prefill.tiles(query_starts, context_lens, 0, visible_ends)

    def captured_tiles(self, num_tokens: int) -> int:
        return self._prefill.captured_tiles(num_tokens) + min(self._max_rows, num_tokens)

    def begin(self, decode_rows: RowArrays) -> None:
        """Do nothing: the layers share no work."""

    def attend(
        self, qkv: Tensor, layer_cache: Tensor, page_table: Tensor, step: CudaStep, sinks: Tensor, out: Tensor
    ) -> None:
        tiles = step.prefill_tiles
        if tiles is None:
            tiles = self._one_token_tiles[: len(step.decode_rows.slots)]
        self._prefill.attend(
            self._launcher, self._workspace, qkv, layer_cache, page_table, step.rows, tiles, sinks, out,
            step.visible_ends,
        )  # fmt: skip
