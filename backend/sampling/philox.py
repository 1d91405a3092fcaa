"""Random numbers for sampling: Philox4x32-10, a counter-based generator (Salmon et al., SC 2011).

A number depends only on its key (the request's seed) and its counter (the token's position). There is no state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)


def philox_uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position) pair, [n] float64 with 53 random bits."""
    counters = positions.astype(np.uint64)
    c0, c1 = counters & _LOW32, counters >> _SHIFT32
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    k0, k1 = seeds & _LOW32, seeds >> _SHIFT32
    for _ in range(10):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT32) ^ c1 ^ k0, p1 & _LOW32, (p0 >> _SHIFT32) ^ c3 ^ k1, p0 & _LOW32
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW32, (k1 + _KEY_STEPS[1]) & _LOW32
    bits = (c0 << np.uint64(21)) | (c1 >> np.uint64(11))
    return np.asarray(bits.astype(np.float64) * 2.0**-53, dtype=np.float64)
