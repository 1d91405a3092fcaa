"""Memory that the native kernels compute in."""

from __future__ import annotations

import torch


class Buffer:
    """A row-major array that grows to the largest number of rows reserved so far."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.width = width
        self.row_bytes = width * dtype.itemsize
        self._dtype = dtype
        self._num_rows = 0
        self.rows = torch.empty(0, width, dtype=dtype)
        self.address = 0

    def reserve(self, num_rows: int) -> bool:
        """Return whether the array moved."""
        if num_rows <= self._num_rows:
            return False
        self._num_rows = num_rows
        self.rows = torch.empty(num_rows, self.width, dtype=self._dtype)
        self.address = self.rows.data_ptr()
        return True
