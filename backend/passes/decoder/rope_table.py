"""The cos and sin table of rotary position embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backend.checkpoint.decoder_config import RopeConfig

_FIRST_POSITIONS = 4096


class RopeTable:
    """Rows [cos | sin] for positions 0 … n - 1, [n, rotary_dim] fp32, computed in fp64.

    The table doubles when a sequence outgrows it, so positions that no sequence reaches take no memory.
    """

    def __init__(self, rope: RopeConfig) -> None:
        self._inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float64)
        self._factor = rope.attention_factor
        self.rows = torch.empty(0, 2 * len(rope.inv_freq), dtype=torch.float32)
        self._num_positions = 0

    def cover(self, num_positions: int) -> Tensor:
        """Return the table with at least num_positions rows. Tables returned earlier stay valid."""
        if num_positions > self._num_positions:
            size = max(_FIRST_POSITIONS, self._num_positions)
            while size < num_positions:
                size *= 2
            angles = torch.outer(torch.arange(size, dtype=torch.float64), self._inv_freq)
            self._num_positions = size
            self.rows = (torch.cat([angles.cos(), angles.sin()], dim=1) * self._factor).float()
        return self.rows
