"""Copies of a slot's states in all layers, to and from checkpoints and bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.backend.forward_pass import StepBatch


@dataclass(slots=True)
class CopiedStates:
    """A checkpoint is a state behind those of slots, so it has the number num_slots + n. Spares are behind these."""

    num_slots: int = 0
    num_checkpoints: int = 0
    arrays: list[NDArray[np.float32]] = field(default_factory=list)
    """[states, …], for each part of a layer's state."""

    def copy(self, source: int, destination: int) -> None:
        for array in self.arrays:
            array[destination] = array[source]

    def go_back(self, batch: StepBatch, num_accepted: Sequence[int]) -> None:
        """Undo the changes that rejected drafts have made: the state before them was kept in a spare."""
        spare, drafts = self.num_slots + self.num_checkpoints, () if batch.drafts is None else batch.drafts.tolist()
        for row, num_drafts, accepted in zip(batch.logit_rows.tolist(), drafts, num_accepted, strict=True):
            if accepted < num_drafts:
                self.copy(spare + accepted, int(batch.slots[row]))
            spare += num_drafts

    def save(self, checkpoint: int, content: NDArray[np.uint8]) -> None:
        """Copy a checkpoint to content, [state bytes]."""
        np.concatenate(self._parts(checkpoint), out=content)

    def restore(self, checkpoint: int, content: NDArray[np.uint8]) -> None:
        end = 0
        for part in self._parts(checkpoint):
            start, end = end, end + len(part)
            part[:] = content[start:end]

    def _parts(self, checkpoint: int) -> list[NDArray[np.uint8]]:
        return [array[self.num_slots + checkpoint].reshape(-1).view(np.uint8) for array in self.arrays]
