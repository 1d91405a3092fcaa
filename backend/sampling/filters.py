"""Change a distribution before a token is sampled: by penalties, by masks, and by filters in the order of
`SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from penstock.backend.forward_pass import FROM_EMBEDDINGS, SamplingParams, TokenMasks


class Penalties:
    """One slot's penalties: which tokens its sequence contains, and how often each was generated."""

    def __init__(
        self, params: SamplingParams, token_ids: NDArray[np.int32], num_prompt_tokens: int, vocab_size: int
    ) -> None:
        self.repetition = params.repetition_penalty
        self.presence = params.presence_penalty
        self.frequency = params.frequency_penalty
        self.generated = np.bincount(token_ids[num_prompt_tokens:], minlength=vocab_size).astype(np.int32)
        self.seen = np.zeros(vocab_size, np.bool_)
        self.seen[token_ids[token_ids != FROM_EMBEDDINGS]] = True

    def count(self, token: int) -> None:
        """Count a sampled token."""
        self.generated[token] += 1
        self.seen[token] = True


def apply_penalties(logits: NDArray[np.float32], penalties: list[Penalties]) -> NDArray[np.float32]:
    """Return logits [n, V] with each row's penalties: repetition first, then frequency and presence."""
    seen = np.stack([p.seen for p in penalties])
    generated = np.stack([p.generated for p in penalties])
    repetition, frequency, presence = (
        np.array([values], np.float32).T
        for values in (
            [p.repetition for p in penalties],
            [p.frequency for p in penalties],
            [p.presence for p in penalties],
        )
    )
    logits = np.where(seen, np.where(logits > 0, logits / repetition, logits * repetition), logits)
    result: NDArray[np.float32] = logits - frequency * generated - presence * (generated > 0)
    return result.astype(np.float32, copy=False)


_ALLOWED = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.bool_)
_CEILINGS = np.where(_ALLOWED, np.float32(np.inf), np.float32(-np.inf))
"""[256, 8] for each byte of a mask, the upper bound of the logits of its eight tokens."""


def masked_rows(logits: NDArray[np.float32], masks: TokenMasks) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield each masked row of logits [L, V] with its masked values, [V]: -inf where not allowed. A NaN stays a NaN.

    The values are valid until the next row: one buffer is reused, which stays in the CPU cache, and logits are not
    copied.
    """
    values = np.empty(logits.shape[1], np.float32)
    ceiling = np.empty((masks.bits.shape[1] * 4, 8), np.float32)
    for row, bits in zip(masks.rows.tolist(), masks.bits.view(np.uint8), strict=True):
        np.take(_CEILINGS, bits, axis=0, out=ceiling, mode="clip")
        yield row, np.minimum(logits[row], ceiling.reshape(-1)[: len(values)], out=values)


_NUCLEUS_GUESS = 1024


def filtered_weights(
    scaled: NDArray[np.float32],
    *,
    top_k: NDArray[np.int64],
    typical_p: NDArray[np.float64],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
    top_n_sigma: NDArray[np.float64],
) -> NDArray[np.float32]:
    """Unnormalised probabilities of the tokens that the filters keep, [n, V]; 0 for the others, which become -inf.

    scaled [n, V] are logits divided by temperature, with each row's maximum at 0; they are changed in place. The
    settings are [n]; values that switch a filter off are those of `SamplingParams`.
    """
    num_rows, vocab_size = scaled.shape
    floor = np.full(num_rows, -np.inf, np.float32)
    for row in np.flatnonzero(top_n_sigma > 0).tolist():
        finite = scaled[row][np.isfinite(scaled[row])]
        floor[row] = -top_n_sigma[row] * finite.std(dtype=np.float64)
    top_k = np.minimum(top_k, vocab_size)
    limited = np.flatnonzero((top_k > 0) & (top_k < vocab_size))
    if len(limited):
        floor[limited] = np.maximum(floor[limited], _kth_largest(scaled[limited], top_k[limited]))
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
    scaled[scaled < floor[:, None]] = -np.inf
    return np.exp(scaled, out=np.empty_like(scaled))


def exclude_top(kept: NDArray[np.float32], threshold: float) -> None:
    """XTC on one row, [V], of kept logits with the maximum at 0, in place; other tokens are -inf.

    Drops all but the least likely of the tokens whose probability reaches threshold. Those that tie with it stay.
    """
    total = np.exp(kept).sum(dtype=np.float64)
    with np.errstate(divide="ignore"):
        reached = np.isfinite(kept) & (kept >= np.float32(np.log(threshold * total)))
    if np.count_nonzero(reached) > 1:
        kept[kept > kept[reached].min()] = -np.inf


def dynamic_temperature(kept: NDArray[np.float32], temperature: float, spread: float, exponent: float) -> float:
    """Return the temperature within spread of the given one, by the entropy of one row of kept logits, [V]."""
    logits = kept[np.isfinite(kept)].astype(np.float64)
    if len(logits) <= 1:
        return temperature
    mass = np.exp(logits - logits.max())
    mass /= mass.sum()
    entropy = -np.sum(mass * np.log(mass, where=mass > 0, out=np.zeros_like(mass))) / np.log(len(logits))
    lowest, highest = max(0.0, temperature - spread), temperature + spread
    return float(lowest + (highest - lowest) * max(0.0, entropy) ** exponent)


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
