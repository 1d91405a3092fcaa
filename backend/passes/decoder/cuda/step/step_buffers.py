"""What the device knows of a step, at addresses that never change, and how it gets there: one copy a step.

The host writes a step into a pinned block, two of them in turn, and one copy brings as much of it as there is into the
device's block. That begins with arrays of fixed places, which captured graphs read; behind the token ids comes what
only kernels launched with the step read. Page tables stay on the device: only their changes travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from penstock.backend.forward_pass import FROM_EMBEDDINGS
from penstock.backend.passes.decoder.cuda.device.launcher import Kernel
from penstock.backend.passes.decoder.cuda.device.transfers import Uplink, aligned
from penstock.backend.passes.decoder.cuda.step.step_rows import RowArrays
from penstock.backend.passes.decoder.prompt_embeddings import check_embeddings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.backend.forward_pass import StepBatch
    from penstock.backend.passes.decoder.cuda.device.device import Device

    Ints = NDArray[np.int32]

_CHANGES_AT_ONCE = 1 << 13
"""Entries of page tables."""
_CHANGE_PAGES = Kernel("step.cu", "change_pages", (), num_threads=128)


def kernels() -> Iterator[Kernel]:
    """All instantiations, see `kernel_manifest`."""
    yield _CHANGE_PAGES


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What steps can be: fixed when the cache is made."""

    max_rows: int
    max_tokens: int
    max_pages: int
    """Of one sequence."""
    page_size_tokens: int
    num_pages: int
    vocab_size: int
    tail_ints: int
    """Of what may travel along with a step."""


class StepBuffers:
    """Owns the device's step block and page table, and their mirror on the host. Used by the pass's thread alone."""

    def __init__(self, device: Device, limits: StepLimits) -> None:
        self._device = device
        self._limits = limits
        rows = limits.max_rows
        sizes = {"query_starts": rows + 1, "context_lens": rows, "slots": rows}
        sizes |= {f"logit_{name}": size for name, size in sizes.items()} | {"logit_tokens": rows}
        self._places: dict[str, slice] = {}
        start = 0
        for name, size in sizes.items():
            self._places[name] = slice(start, start + size)
            start += aligned(size)
        self._ids_start = start
        self._fixed = np.zeros(start + limits.max_tokens, np.int32)
        self._pages = np.full((rows, limits.max_pages), -1, np.int32)
        """What the device's page table holds."""

        self.uplink = Uplink(device, self.num_bytes(limits) // 4 - self._pages.size)
        self.page_table = torch.zeros(rows, limits.max_pages, dtype=torch.int32, device=device.torch_device)
        """int32 [max_rows, max_pages], by slot."""
        self.input_ids = self.uplink.block[start : start + limits.max_tokens]
        self.rows = RowArrays(*(self._view(name) for name in ("query_starts", "context_lens", "slots")))
        """All rows that a step can have."""
        self.logit_rows = RowArrays(
            *(self._view(f"logit_{name}") for name in ("query_starts", "context_lens", "slots"))
        )
        """The last tokens of the rows that want logits, as rows of one token each."""
        self.logit_tokens = self._view("logit_tokens")
        """Where those tokens lie in the step."""
        for arrays in (self.rows, self.logit_rows):  # all of them padding, until the first step
            arrays.slots.fill_(-1)
            torch.arange(rows + 1, dtype=torch.int32, out=arrays.query_starts)

    @staticmethod
    def num_bytes(limits: StepLimits) -> int:
        """Of the device's memory."""
        fixed = 7 * aligned(limits.max_rows + 1) + aligned(limits.max_tokens)
        tail = aligned(limits.tail_ints) + aligned(3 * _CHANGES_AT_ONCE)
        return 4 * (fixed + tail + limits.max_rows * limits.max_pages)

    def load(self, batch: StepBatch, num_padded_rows: int, parts: list[Ints]) -> list[Tensor]:
        """Brings the step to the device, rows beyond the batch's up to num_padded_rows as padding, and page changes.

        parts, of tail_ints in all, travel along; returns where they are, each int32 [n]. The token ids FROM_SLOT
        and FROM_EMBEDDINGS stay. Raises ValueError for a batch that breaks its contract.
        """
        changes = self._page_changes(batch, self._check(batch))
        try:
            return self._send(batch, num_padded_rows, changes, parts)
        except Exception:
            self._pages[batch.slots] = -1  # who knows what has arrived
            raise

    def _send(self, batch: StepBatch, num_padded_rows: int, changes: Ints, parts: list[Ints]) -> list[Tensor]:
        while len(changes) > _CHANGES_AT_ONCE:
            # Only where a step brings very many pages at once: ahead of it, in copies of their own.
            self._apply(*self.uplink.send([changes[:_CHANGES_AT_ONCE]]))
            changes = changes[_CHANGES_AT_ONCE:]
        self._write_fixed(batch, num_padded_rows)
        used = self._ids_start + max(batch.num_tokens, num_padded_rows)
        _, sent, *rest = self.uplink.send([self._fixed[:used], changes, *parts])
        self._apply(sent)
        return rest

    def _view(self, name: str) -> Tensor:
        return self.uplink.block[self._places[name]]

    def _check(self, batch: StepBatch) -> Ints:
        """Where each row ends, [R]: tokens of its sequence. Raises ValueError."""
        limits, starts = self._limits, batch.query_starts
        if batch.num_tokens > limits.max_tokens or batch.num_rows > limits.max_rows:
            raise ValueError(
                f"the step has {batch.num_tokens} tokens in {batch.num_rows} rows; "
                f"at most {limits.max_tokens} in {limits.max_rows} are allowed"
            )
        lengths = np.diff(starts)
        if len(lengths) != batch.num_rows or starts[0] != 0 or starts[-1] != batch.num_tokens or lengths.min() < 1:
            raise ValueError(f"rows begin at {starts.tolist()}, of {batch.num_rows} rows and {batch.num_tokens} tokens")
        if batch.slots.min() < 0 or batch.slots.max() >= limits.max_rows:
            raise ValueError(f"slots are {batch.slots.min()} … {batch.slots.max()}; there are {limits.max_rows}")
        if batch.input_ids.min() < FROM_EMBEDDINGS or batch.input_ids.max() >= limits.vocab_size:
            raise ValueError(
                f"token ids are {batch.input_ids.min()} … {batch.input_ids.max()}; the vocabulary has "
                f"{limits.vocab_size}"
            )
        check_embeddings(batch)
        if len(wanting := batch.logit_rows) and (wanting[0] < 0 or wanting[-1] >= batch.num_rows):
            raise ValueError(f"logits are wanted of rows {wanting[0]} … {wanting[-1]}; there are {batch.num_rows}")
        ends: Ints = batch.context_lens + lengths
        held = min(batch.page_table.shape[1], limits.max_pages) * limits.page_size_tokens
        if ends.max() > held or batch.context_lens.min() < 0:
            raise ValueError(f"a row ends at {ends.max()} tokens; its pages hold {held}")
        return ends

    def _page_changes(self, batch: StepBatch, ends: Ints) -> Ints:
        """[n, 3] slot, place and page where the batch's pages differ from what the device has. Notes them as done."""
        limits = self._limits
        num_pages = -(-ends // limits.page_size_tokens)
        width = int(num_pages.max())
        wanted = batch.page_table[:, :width]
        differs = (wanted != self._pages[batch.slots, :width]) & (np.arange(width) < num_pages[:, None])
        rows, places = np.nonzero(differs)
        changes = np.empty((len(rows), 3), np.int32)
        if not len(rows):
            return changes
        pages, slots = wanted[rows, places], batch.slots[rows]
        if pages.min() < 0 or pages.max() >= limits.num_pages:
            raise ValueError(f"pages are {pages.min()} … {pages.max()}; there are {limits.num_pages}")
        self._pages[slots, places] = pages
        changes[:, 0], changes[:, 1], changes[:, 2] = slots, places, pages
        return changes

    def _write_fixed(self, batch: StepBatch, num_padded_rows: int) -> None:
        fixed, places = self._fixed, self._places
        num_rows, num_logits = batch.num_rows, len(batch.logit_rows)
        ids = fixed[self._ids_start :]
        ids[: batch.num_tokens] = batch.input_ids
        ids[batch.num_tokens : num_padded_rows] = 0
        fixed[places["query_starts"]][: num_rows + 1] = batch.query_starts
        fixed[places["context_lens"]][:num_rows] = batch.context_lens
        fixed[places["slots"]][:num_rows] = batch.slots
        ends = batch.query_starts[1:][batch.logit_rows]
        fixed[places["logit_tokens"]][:num_logits] = ends - 1
        starts = fixed[places["logit_query_starts"]]
        starts[:] = np.arange(len(starts))
        lengths = ends - batch.query_starts[batch.logit_rows]
        fixed[places["logit_context_lens"]][:num_logits] = batch.context_lens[batch.logit_rows] + lengths - 1
        fixed[places["logit_slots"]][:num_logits] = batch.slots[batch.logit_rows]
        if num_padded_rows > num_rows:
            padding = slice(num_rows, num_padded_rows)
            fixed[places["query_starts"]][num_rows + 1 : num_padded_rows + 1] = np.arange(num_rows, num_padded_rows) + 1
            for name in ("context_lens", "logit_context_lens"):
                fixed[places[name]][padding] = 0
            for name in ("slots", "logit_slots"):
                fixed[places[name]][padding] = -1
            fixed[places["logit_tokens"]][padding] = np.arange(num_rows, num_padded_rows)

    def _apply(self, changes: Tensor) -> None:
        n = len(changes) // 3
        grid = (-(-n // _CHANGE_PAGES.num_threads), 1, 1)
        max_pages = np.int32(self._limits.max_pages)
        self._device.launcher.launch(_CHANGE_PAGES, grid, changes, self.page_table, np.int32(n), max_pages)
