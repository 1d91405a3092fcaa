"""The cos and sin table of rotary position embeddings."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.backend.checkpoint.config.decoder_config import RopeConfig

_FIRST_POSITIONS = 4096


class RopeTable:
    """Rows [cos | sin] for positions 0 … n - 1, [n, rotary_dim] fp32, computed in fp64.

    The rows of several ropes are joined: [n, sum of their rotary_dim]. The table doubles when
    a sequence outgrows it, so positions that no sequence reaches take no memory.
    """

    def __init__(self, *ropes: RopeConfig) -> None:
        self._ropes = ropes
        self.begins = tuple(accumulate((rope.rotary_dim for rope in ropes), initial=0))
        """Where the numbers of each rope begin in a row, and where the last end."""
        self.rows = torch.empty(0, sum(rope.rotary_dim for rope in ropes), dtype=torch.float32)
        self._num_positions = 0
        axes = [(rope.axes or (0,) * (rope.rotary_dim // 2)) * 2 for rope in ropes]
        self._axes = torch.tensor([axis for own in axes for axis in own], dtype=torch.int64)
        self._columns = torch.arange(len(self._axes))

    def of_tokens(self, rope_positions: NDArray[np.int32]) -> Tensor:
        """Rows for `StepBatch.rope_positions`, [T, sum of rotary_dim]."""
        positions = torch.from_numpy(rope_positions.astype(np.int64))
        return self.cover(int(rope_positions.max()) + 1)[positions[:, self._axes], self._columns]

    def cover(self, num_positions: int) -> Tensor:
        """Return the table with at least num_positions rows. Tables returned earlier stay valid."""
        if num_positions > self._num_positions:
            size = max(_FIRST_POSITIONS, self._num_positions)
            while size < num_positions:
                size *= 2
            positions = torch.arange(size, dtype=torch.float64)
            parts: list[Tensor] = []
            for rope in self._ropes:
                angles = torch.outer(positions, torch.tensor(rope.inv_freq, dtype=torch.float64))
                factors = _factors(rope, positions)
                parts += [(turned * factors).float() for turned in (angles.cos(), angles.sin())]
            self._num_positions = size
            self.rows = torch.cat(parts, dim=1)
        return self.rows


def _factors(rope: RopeConfig, positions: Tensor) -> Tensor:
    """Return the factor of cos and sin at each position, [n, 1]."""
    factors = torch.full_like(positions, rope.attention_factor)
    if rope.scale is not None:
        factors *= 1 + rope.scale.beta * torch.log1p(torch.floor(positions / rope.scale.period))
    return factors[:, None]
