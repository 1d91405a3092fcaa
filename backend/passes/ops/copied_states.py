"""Copies of a slot's states in all layers, to and from checkpoints and bytes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(slots=True)
class CopiedStates:
    """A checkpoint is a state behind those of slots, so it has the number num_slots + n."""

    num_slots: int = 0
    arrays: list[NDArray[np.float32]] = field(default_factory=list)
    """[states, …], for each part of a layer's state."""

    def copy(self, source: int, destination: int) -> None:
        for array in self.arrays:
            array[destination] = array[source]

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
