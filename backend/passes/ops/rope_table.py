"""The cos and sin table of rotary position embeddings."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from penstock.backend.checkpoint.config.decoder_config import RopeConfig
from penstock.backend.dtypes import Dtype, empty_array

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
        self.rows = empty_array((0, self.begins[-1]), Dtype.FP32)
        self._num_positions = 0
        axes = [(rope.axes or (0,) * (rope.rotary_dim // 2)) * 2 for rope in ropes]
        self._axes = np.array([axis for own in axes for axis in own], np.int64)
        self._columns = np.arange(len(self._axes))

    def of_tokens(self, rope_positions: NDArray[np.int32]) -> NDArray[np.float32]:
        """Rows for `StepBatch.rope_positions`, [T, sum of rotary_dim] in C order."""
        table = self.cover(int(rope_positions.max()) + 1)
        return np.ascontiguousarray(table[rope_positions[:, self._axes], self._columns])

    def cover(self, num_positions: int) -> NDArray[np.float32]:
        """Return the table with at least num_positions rows. Tables returned earlier stay valid."""
        if num_positions > self._num_positions:
            size = max(_FIRST_POSITIONS, self._num_positions)
            while size < num_positions:
                size *= 2
            positions = np.arange(size, dtype=np.float64)[:, None]
            parts: list[NDArray[np.float32]] = []
            for rope in self._ropes:
                angles = positions * np.array(rope.inv_freq)
                factors = _factors(rope, positions)
                parts += [(turn(angles) * factors).astype(np.float32) for turn in (np.cos, np.sin)]
            self._num_positions = size
            self.rows = empty_array((size, self.begins[-1]), Dtype.FP32)
            np.concatenate(parts, axis=1, out=self.rows)
        return self.rows


def _factors(rope: RopeConfig, positions: NDArray[np.float64]) -> NDArray[np.float64] | float:
    """Return the factor of cos and sin at each position."""
    if rope.scale is None:
        return rope.attention_factor
    return rope.attention_factor * (1 + rope.scale.beta * np.log1p(np.floor(positions / rope.scale.period)))
