"""The device's copy of a step, at fixed addresses. It arrives in one copy per step.

The host writes a step into one of two pinned blocks in turn, and one copy sends the used part to the device's block.
The block begins with arrays at fixed addresses, which captured graphs read; a mixed step's tiles are the last of them.
After these come the parts that only kernels launched with the step read. Page tables stay on the device; only their
changes are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import CDLL

import numpy as np
import torch
from torch import Tensor

from penstock.backend.forward_pass import StepBatch
from penstock.backend.passes.cuda.device.device import Device
from penstock.backend.passes.cuda.device.launcher import Kernel, int32
from penstock.backend.passes.cuda.device.transfers import Uplink, aligned
from penstock.backend.passes.cuda.step.step_packing import Ints, MixedPadding, StepLimits, StepPacker
from penstock.backend.passes.cuda.step.step_rows import CudaStep, RowArrays
from penstock.backend.passes.ops.layer_groups import check_groups

_CHANGES_AT_ONCE = 1 << 13
"""Most changed page table entries in one copy."""
_CHANGE_PAGES = Kernel("step/step.cu", "change_pages", (), num_threads=128)


def kernels() -> Iterator[Kernel]:
    """Yield all instantiations; see `kernel_manifest`."""
    yield _CHANGE_PAGES


class StepBuffers:
    """Owns the device's step block and page table, and their host copies. Only the pass's thread uses it."""

    def __init__(self, device: Device, limits: StepLimits, library: CDLL) -> None:
        """library: see `StepPacker`."""
        self._device = device
        self._limits = limits
        self._places = _places(limits)
        self.uplink = Uplink(device, _num_ints(limits))
        self._packer = StepPacker(library, limits, self._places, (_CHANGES_AT_ONCE, self.uplink.num_ints))
        shape = self._packer.pages.shape
        self.page_tables = torch.zeros(shape, dtype=torch.int32, device=device.torch_device)
        """int32 [groups, max_rows, max_pages], by slot."""
        self.input_ids = self._view("ids")
        self.tiles = self._view("tiles")
        """The tiles of a mixed step, flat: its own and unused ones."""
        names = ("query_starts", "context_lens", "slots")
        self.rows = RowArrays(*map(self._view, names))
        """Views of all rows that a step can have, and one more, which is padding in every mixed step."""
        decode_slots = self._view("decode_slots")
        self.decode_rows = RowArrays(self.rows.query_starts, self.rows.context_lens, decode_slots)
        """See `CudaStep.decode_rows`; for a mixed step only."""
        self.logit_rows = RowArrays(*(self._view(f"logit_{name}") for name in names))
        """The last tokens of the rows that need logits, and the tokens before drafts, as rows of one token each."""
        self.logit_tokens = self._view("logit_tokens")
        """Index of each of those tokens in the step."""
        self.drawn_slots = self._view("drawn_slots")
        """`logit_rows.slots` if a captured step draws its tokens; otherwise -1."""
        self.adapters = self._view("adapters")
        """int32 [max_tokens]: by token, its row's adapter; empty for a pass without adapters, as logit_adapters."""
        self.logit_adapters = self._view("logit_adapters")
        """By logit row."""
        self._nothing = self.uplink.block[:0]
        for arrays in (self.rows, self.logit_rows):  # all rows are padding until the first step
            arrays.slots.fill_(-1)
            torch.arange(len(arrays.query_starts), dtype=torch.int32, out=arrays.query_starts)
        decode_slots.fill_(-1)
        self.drawn_slots.fill_(-1)
        self.adapters.fill_(-1)

    @staticmethod
    def num_bytes(limits: StepLimits) -> int:
        """Return the bytes of device memory."""
        return 4 * (_num_ints(limits) + limits.num_groups * limits.max_rows * limits.max_pages)

    def load(
        self,
        batch: StepBatch,
        num_padded_rows: int,
        parts: Sequence[Ints],
        mixed: MixedPadding | None = None,
        *,
        is_drawn: bool = False,
    ) -> list[Tensor]:
        """Send the step, padded to num_padded_rows rows or as `mixed`, and its page table changes to the device.

        parts, at most tail_ints in total, are sent along; returns them on the device, each int32 [n]. The token ids
        FROM_SLOT and FROM_EMBEDDINGS are sent unchanged. is_drawn: a captured step draws the tokens. Raises ValueError
        for an invalid batch.
        """
        if batch.adapters is not None and not self._limits.has_adapters:
            raise ValueError("rows of the step have adapters; the pass has none")
        if (1 if batch.page_table.ndim == 2 else batch.page_table.shape[2]) != self._limits.num_groups:
            check_groups(batch, self._limits.num_groups)
        uplink = self.uplink
        packed = self._packer.pack(batch, uplink.open().address, num_padded_rows, mixed, parts, is_drawn=is_drawn)
        try:
            uplink.copy(packed.num_ints)
            if packed.num_changes:
                self._change_pages(packed.changes_start, packed.num_changes)
        except Exception:
            self._packer.pages[:, batch.slots] = -1  # unknown: some of the changes may have arrived
            raise
        block, starts = uplink.block, packed.part_starts
        return [
            block[starts[index] : starts[index] + part.size] if part.size else self._nothing
            for index, part in enumerate(parts)
        ]

    def step(self, batch: StepBatch, num_decode: int, tiles: Tensor | None) -> CudaStep:
        """Return a step that `load` has sent without padding, whose first num_decode rows have one token.

        tiles: `CudaStep.prefill_tiles`.
        """
        num_logits = batch.num_sampled
        return CudaStep(
            num_tokens=batch.num_tokens,
            rows=self.rows.cut(batch.num_rows),
            decode_rows=self.rows.cut(num_decode),
            prefill_tiles=tiles,
            logit_rows=self.logit_rows.cut(num_logits),
            logit_tokens=self.logit_tokens[:num_logits],
            is_decode_only=num_decode == num_logits == batch.num_rows,
            is_scored=batch.scored is not None,
            rope_positions=self._rope_positions(batch.num_tokens),
            adapters=None if batch.adapters is None else self.adapters[: batch.num_tokens],
        )

    def decode_step(self, num_rows: int, *, has_adapters: bool = False) -> CudaStep:
        """Return a step of num_rows decodes, at the addresses that a graph reads."""
        rows, logit_rows = self.rows.cut(num_rows), self.logit_rows.cut(num_rows)
        return CudaStep(
            num_rows, rows, rows, None, logit_rows, self.logit_tokens[:num_rows], True,
            rope_positions=self._rope_positions(num_rows), adapters=self.adapters[:num_rows] if has_adapters else None,
        )  # fmt: skip

    def mixed_step(self, num_tokens: int, num_tiles: int) -> CudaStep:
        """Like `decode_step`, for a mixed step without its logits."""
        return CudaStep(
            num_tokens=num_tokens,
            rows=self.rows,
            decode_rows=self.decode_rows,
            prefill_tiles=self.tiles[: 4 * num_tiles],
            logit_rows=self.logit_rows.cut(0),
            logit_tokens=self.logit_tokens[:0],
            is_decode_only=False,
            rope_positions=self._rope_positions(num_tokens),
        )

    def _rope_positions(self, num_tokens: int) -> Tensor | None:
        """Those behind the ids of a step with this many tokens."""
        start = self._places["ids"].start
        return self.uplink.block[start + num_tokens : start + 4 * num_tokens] if self._limits.has_axes else None

    def _view(self, name: str) -> Tensor:
        return self.uplink.block[self._places[name]]

    def _change_pages(self, start: int, num_changes: int) -> None:
        if num_changes > _CHANGES_AT_ONCE:  # only of a step with very many new pages
            self.page_tables.copy_(torch.from_numpy(self._packer.pages))
            return
        changes = self.uplink.block[start : start + 3 * num_changes]
        grid = (-(-num_changes // _CHANGE_PAGES.num_threads), 1, 1)
        max_pages = int32(self._limits.max_pages)
        self._device.launcher.launch(_CHANGE_PAGES, grid, changes, self.page_tables, int32(num_changes), max_pages)


def count_decode_rows(batch: StepBatch) -> int:
    """Return the number of rows of one token. Raises ValueError if they do not come first."""
    num_decode = int((np.diff(batch.query_starts) == 1).sum())
    if batch.query_starts[num_decode] != num_decode:
        raise ValueError("rows of one token must come first")
    return num_decode


def _places(limits: StepLimits) -> dict[str, slice]:
    """Return where each fixed array is in the block, in the order of kernels/step/pack_step.cpp. Ids of steps that are
    not mixed may lie where tiles are too."""
    rows, logits, places, start = limits.max_rows, limits.max_logits, dict[str, slice](), 0
    sizes = {"query_starts": rows + 2, "context_lens": rows + 1, "slots": rows + 1, "decode_slots": rows}
    sizes |= {"logit_query_starts": logits + 1, "logit_context_lens": logits, "logit_slots": logits}
    sizes |= {"logit_tokens": logits, "drawn_slots": rows, "adapters": limits.max_tokens, "logit_adapters": logits}
    for name, size in sizes.items():
        size *= limits.has_adapters or not name.endswith("adapters")
        places[name] = slice(start, start + size)
        start += aligned(size)
    places["ids"] = slice(start, start + limits.token_ints * limits.max_tokens)
    start += aligned(limits.token_ints * limits.mixed_tokens)
    places["tiles"] = slice(start, start + 4 * limits.mixed_tiles)
    return places


def _num_ints(limits: StepLimits) -> int:
    places = _places(limits)
    fixed = aligned(max(places["ids"].stop, places["tiles"].stop))
    return fixed + aligned(limits.tail_ints) + aligned(3 * _CHANGES_AT_ONCE)
