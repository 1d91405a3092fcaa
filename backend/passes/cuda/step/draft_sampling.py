"""Verifies drafts on the device: all positions of a row are sampled at once (kernels/sampling/drafts.cu).

Each position has a slot of its own: a copy of the row's, whose counts include the drafts before. So its token is the
one that would be sampled there without drafts, if these are. Then the drawn drafts are counted in the row's slot.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from penstock.backend.forward_pass import StepBatch
from penstock.backend.passes.cuda.device.launcher import Kernel, Launcher
from penstock.backend.passes.cuda.device.transfers import Ints
from penstock.backend.passes.cuda.step.device_sampler import MAX_BIASES, SlotArrays

_ROW_INTS = 4
_PIECE_COUNTS, _MAX_PIECES = 8 * 256, 8
"""A slot's counts that a block copies, or a multiple of them; and most such blocks."""
_OPEN_DRAFTS = Kernel("sampling/drafts.cu", "open_drafts", (("ACT", 0),), num_threads=256)
_ACCEPT_DRAFTS = Kernel("sampling/drafts.cu", "accept_drafts", (("ACT", 0),), num_threads=32)


def kernels() -> Iterator[Kernel]:
    """Yield all instantiations; see `kernel_manifest`."""
    yield from (_OPEN_DRAFTS, _ACCEPT_DRAFTS)


class DraftSampling:
    """Call `open` before the positions are sampled, and `accept` after."""

    kernels = _OPEN_DRAFTS, _ACCEPT_DRAFTS
    """The kernels to pass to `Launcher.prepare`."""

    def __init__(
        self, launcher: Launcher, slots: SlotArrays, first_copy: int, step: tuple[Tensor, Tensor, Tensor]
    ) -> None:
        """From first_copy on, slots are for positions. step: the ids of its tokens, the tokens whose logits are
        sampled, and their slots."""
        self._launcher, self._slots, self._first_copy, self._step = launcher, slots, first_copy, step
        self._vocab_size = np.int32(slots.vocab_size)
        self._pieces = min(_MAX_PIECES, -(-slots.vocab_size // _PIECE_COUNTS))
        self._most_drafts = 0

    def pack(self, batch: StepBatch, drafts: Ints) -> tuple[Ints, Ints]:
        """Return the slots that sample the step's [L + D] positions, and its rows with drafts, as DraftRow [n, 4]."""
        num_rows, drafted = len(drafts), np.flatnonzero(drafts)
        counts = drafts[drafted]
        firsts, copies = (np.cumsum(sizes) - sizes for sizes in (counts, counts + 1))
        slots = np.empty(batch.num_sampled, np.int32)
        slots[:num_rows] = batch.slots[batch.logit_rows]
        slots[drafted] = self._first_copy + copies + counts
        slots[num_rows:] = self._first_copy + np.delete(np.arange(counts.sum() + len(counts)), copies + counts)
        self._most_drafts = int(counts.max())
        rows = np.stack([drafted, num_rows + firsts, counts, self._first_copy + copies], axis=1)
        return slots, rows.astype(np.int32)

    def open(self, rows: Tensor) -> None:
        """Copy the slots of the rows that `pack` returned, now on the device."""
        arrays, grid = self._slots, (len(rows) // _ROW_INTS, 1 + self._most_drafts, self._pieces)
        self._launcher.launch(
            _OPEN_DRAFTS, grid, rows, *self._step, arrays.params, arrays.counts, arrays.bias_tokens,
            arrays.bias_values, self._vocab_size, np.int32(MAX_BIASES),
        )  # fmt: skip

    def accept(self, rows: Tensor, mask_rows: Tensor, tokens: Tensor, accepted: Tensor) -> None:
        """Find the token of each row among those of its positions, [L + D], and how many of its drafts were drawn."""
        arrays = self._slots
        self._launcher.launch(
            _ACCEPT_DRAFTS, (len(rows) // _ROW_INTS, 1, 1), rows, *self._step, arrays.params, arrays.counts,
            mask_rows, arrays.last_tokens, tokens, accepted, self._vocab_size,
        )  # fmt: skip
