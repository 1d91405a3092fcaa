"""The filters of a distribution: top-k, typical-p, top-p and min-p, in this order. See `SamplingParams`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NUCLEUS_GUESS = 1024


def filtered_weights(
    scaled: NDArray[np.float32],
    *,
    top_k: NDArray[np.int64],
    typical_p: NDArray[np.float64],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
) -> NDArray[np.float32]:
    """Unnormalised probabilities of the tokens that the filters keep, [n, V]; 0 for the others.

    scaled [n, V] are logits divided by temperature, with each row's maximum at 0; they are changed in place. The
    settings are [n]; values that switch a filter off are those of `SamplingParams`.
    """
    num_rows, vocab_size = scaled.shape
    floor = np.full(num_rows, -np.inf, np.float32)
    top_k = np.minimum(top_k, vocab_size)
    limited = np.flatnonzero((top_k > 0) & (top_k < vocab_size))
    if len(limited):
        floor[limited] = _kth_largest(scaled[limited], top_k[limited])
    typical = np.flatnonzero(typical_p < 1.0)
    for row in typical.tolist():
        _keep_typical(scaled[row], floor[row], float(typical_p[row]))
    nucleus = np.flatnonzero(top_p < 1.0)
    if len(nucleus):
        floor[nucleus] = _nucleus_floor(scaled[nucleus], floor[nucleus], top_p[nucleus])
    with np.errstate(divide="ignore"):
        floor = np.maximum(floor, np.log(min_p).astype(np.float32))
    if len(typical):
        # typical_p may have dropped the peak that min_p refers to: the likeliest remaining token always stays.
        floor[typical] = np.minimum(floor[typical], scaled[typical].max(axis=1))
    weights = np.exp(scaled, out=np.empty_like(scaled))
    weights[scaled < floor[:, None]] = 0.0
    return weights


def _keep_typical(scaled: NDArray[np.float32], floor: np.float32, typical_p: float) -> None:
    """One row, [V], in place: tokens that are not locally typical become -inf.

    Kept are the tokens whose surprise is nearest to the distribution's entropy, until their mass reaches typical_p.
    """
    weights = np.where(scaled < floor, 0.0, np.exp(scaled.astype(np.float64)))
    mass = weights / weights.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = -np.log(mass)
        entropy = np.sum(np.where(mass > 0, mass * surprise, 0.0))
    order = np.argsort(np.where(mass > 0, np.abs(surprise - entropy), np.inf), kind="stable")
    num_kept = int(np.searchsorted(np.cumsum(mass[order]), typical_p)) + 1
    scaled[order[num_kept:]] = -np.inf


def _kth_largest(scaled: NDArray[np.float32], k: NDArray[np.int64]) -> NDArray[np.float32]:
    """The k-th largest value of each row, [n]; k is in [1, V]."""
    widest = int(k.max())
    largest = np.sort(np.partition(scaled, -widest, axis=1)[:, -widest:], axis=1)
    return np.asarray(largest[np.arange(len(k)), widest - k], dtype=np.float32)


def _nucleus_floor(
    scaled: NDArray[np.float32], floor: NDArray[np.float32], top_p: NDArray[np.float64]
) -> NDArray[np.float32]:
    """The smallest value of each row's nucleus, [n]: the largest tokens at or above floor [n] whose mass reaches top_p.

    See arXiv 1904.09751. Sorts only the largest _NUCLEUS_GUESS values first, then all values if needed.
    """
    weights = np.exp(scaled)
    weights[scaled < floor[:, None]] = 0.0
    mass = weights.sum(axis=1, dtype=np.float64)
    result = np.empty(len(floor), np.float32)
    rows = np.arange(len(floor))
    for width in (min(_NUCLEUS_GUESS, scaled.shape[1]), scaled.shape[1]):
        values = np.sort(np.partition(scaled[rows], -width, axis=1)[:, -width:], axis=1)[:, ::-1]
        kept = np.where(values < floor[rows][:, None], 0.0, np.exp(values).astype(np.float64))
        reached = np.cumsum(kept, axis=1) >= (top_p[rows] * mass[rows])[:, None]
        found = reached[:, -1] if width < scaled.shape[1] else np.ones(len(rows), np.bool_)
        last = np.where(reached.any(axis=1), reached.argmax(axis=1), width - 1)
        result[rows[found]] = values[np.arange(len(rows)), last][found]
        rows = rows[~found]
        if not len(rows):
            break
    return np.maximum(result, floor)
