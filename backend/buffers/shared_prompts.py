"""Prompts that clients give as embeddings: rows of their shared buffers, in the form that a pass receives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from penstock.shm.buffers.device_api import DeviceRow

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.backend.forward_pass import DeviceRows
    from penstock.shm.buffers.buffer_export import Loan


@dataclass(frozen=True, slots=True)
class SharedPromptRows:
    """`EmbeddingRows` in a client's buffer."""

    loan: Loan
    first: int
    num_rows: int

    @property
    def device_reads(self) -> bool:
        return self.loan.device_reads

    def read(self) -> NDArray[np.float32]:
        return np.frombuffer(self.loan.read_rows(self.first, self.num_rows), np.float32).reshape(self.num_rows, -1)

    def copy_to(self, there: DeviceRows) -> None:
        self.loan.copy_rows(self.first, self.num_rows, DeviceRow(there.pointer, there.stream))
