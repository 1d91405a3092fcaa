"""The device's copy of a step, at fixed addresses. It arrives in one copy per step.

The host writes a step into one of two pinned blocks in turn, and one copy sends the used part to the device's block.
The block begins with arrays at fixed addresses, which captured graphs read. After the token ids come the parts that
only kernels launched with the step read. Page tables stay on the device; only their changes are sent.
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
"""Most changed page table entries in one copy."""
_CHANGE_PAGES = Kernel("step.cu", "change_pages", (), num_threads=128)


def kernels() -> Iterator[Kernel]:
    """Yield all instantiations; see `kernel_manifest`."""
    yield _CHANGE_PAGES


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of a step, fixed when the cache is created."""

    max_rows: int
    max_tokens: int
    max_pages: int
    """Most pages of one sequence."""
    page_size_tokens: int
    num_pages: int
    vocab_size: int
    tail_ints: int
    """Most ints that the caller may send along with a step."""


class StepBuffers:
    """Owns the device's step block and page table, and their host copies. Only the pass's thread uses it."""

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
        """Contents of the device's page table."""

        self.uplink = Uplink(device, self.num_bytes(limits) // 4 - self._pages.size)
        self.page_table = torch.zeros(rows, limits.max_pages, dtype=torch.int32, device=device.torch_device)
        """int32 [max_rows, max_pages], by slot."""
        self.input_ids = self.uplink.block[start : start + limits.max_tokens]
        self.rows = RowArrays(*(self._view(name) for name in ("query_starts", "context_lens", "slots")))
        """Views of all rows that a step can have."""
        self.logit_rows = RowArrays(
            *(self._view(f"logit_{name}") for name in ("query_starts", "context_lens", "slots"))
        )
        """The last tokens of the rows that need logits, as rows of one token each."""
        self.logit_tokens = self._view("logit_tokens")
        """Index of each of those tokens in the step."""
        for arrays in (self.rows, self.logit_rows):  # all rows are padding until the first step
            arrays.slots.fill_(-1)
            torch.arange(rows + 1, dtype=torch.int32, out=arrays.query_starts)

    @staticmethod
    def num_bytes(limits: StepLimits) -> int:
        """Return the bytes of device memory."""
        fixed = 7 * aligned(limits.max_rows + 1) + aligned(limits.max_tokens)
        tail = aligned(limits.tail_ints) + aligned(3 * _CHANGES_AT_ONCE)
        return 4 * (fixed + tail + limits.max_rows * limits.max_pages)

    def load(self, batch: StepBatch, num_padded_rows: int, parts: list[Ints]) -> list[Tensor]:
        """Send the step, padded to num_padded_rows rows, and its page table changes to the device.

        parts, at most tail_ints in total, are sent along; returns them on the device, each int32 [n]. The token ids
        FROM_SLOT and FROM_EMBEDDINGS are sent as they are. Raises ValueError for an invalid batch.
        """
        changes = self._page_changes(batch, self._check(batch))
        try:
            return self._send(batch, num_padded_rows, changes, parts)
        except Exception:
            self._pages[batch.slots] = -1  # unknown: some of the changes may have arrived
            raise

    def _send(self, batch: StepBatch, num_padded_rows: int, changes: Ints, parts: list[Ints]) -> list[Tensor]:
        while len(changes) > _CHANGES_AT_ONCE:
            # Only a step with very many new pages gets here. The excess goes ahead of the step, in separate copies.
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
        """Return each row's end, [R], in tokens of its sequence. Raises ValueError for an invalid batch."""
        limits, starts = self._limits, batch.query_starts
        if batch.num_tokens > limits.max_tokens or batch.num_rows > limits.max_rows:
            raise ValueError(
                f"the step has {batch.num_tokens} tokens in {batch.num_rows} rows; "
                f"at most {limits.max_tokens} in {limits.max_rows} are allowed"
            )
        lengths = np.diff(starts)
        if len(lengths) != batch.num_rows or starts[0] != 0 or starts[-1] != batch.num_tokens or lengths.min() < 1:
            raise ValueError(
                f"query_starts are {starts.tolist()}, for {batch.num_rows} rows and {batch.num_tokens} tokens"
            )
        if batch.slots.min() < 0 or batch.slots.max() >= limits.max_rows:
            raise ValueError(f"slots are {batch.slots.min()} … {batch.slots.max()}; there are {limits.max_rows}")
        if batch.input_ids.min() < FROM_EMBEDDINGS or batch.input_ids.max() >= limits.vocab_size:
            raise ValueError(
                f"token ids are {batch.input_ids.min()} … {batch.input_ids.max()}; the vocabulary has "
                f"{limits.vocab_size}"
            )
        check_embeddings(batch)
        if len(rows := batch.logit_rows) and (rows[0] < 0 or rows[-1] >= batch.num_rows):
            raise ValueError(f"logit rows are {rows[0]} … {rows[-1]}; there are {batch.num_rows}")
        ends: Ints = batch.context_lens + lengths
        capacity_tokens = min(batch.page_table.shape[1], limits.max_pages) * limits.page_size_tokens
        if ends.max() > capacity_tokens or batch.context_lens.min() < 0:
            raise ValueError(f"a row ends at {ends.max()} tokens; its pages hold {capacity_tokens}")
        return ends

    def _page_changes(self, batch: StepBatch, ends: Ints) -> Ints:
        """Return [n, 3] slot, index and page where the batch's pages differ from the device's; record them as sent."""
        limits = self._limits
        num_pages = -(-ends // limits.page_size_tokens)
        width = int(num_pages.max())
        needed = batch.page_table[:, :width]
        differs = (needed != self._pages[batch.slots, :width]) & (np.arange(width) < num_pages[:, None])
        rows, indices = np.nonzero(differs)
        changes = np.empty((len(rows), 3), np.int32)
        if not len(rows):
            return changes
        pages, slots = needed[rows, indices], batch.slots[rows]
        if pages.min() < 0 or pages.max() >= limits.num_pages:
            raise ValueError(f"pages are {pages.min()} … {pages.max()}; there are {limits.num_pages}")
        self._pages[slots, indices] = pages
        changes[:, 0], changes[:, 1], changes[:, 2] = slots, indices, pages
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
