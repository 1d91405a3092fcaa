"""Log probabilities of sampled and of scored tokens, from the raw logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from penstock.backend.forward_pass import ScoredTokens, TokenLogprobs

_BLOCK_ROWS = 32
"""Tokens that are scored together: there are a few copies of their logits in float64."""


def token_logprobs(
    logits: NDArray[np.float32],
    tokens: NDArray[np.int32],
    rows: NDArray[np.int64],
    width: int,
) -> TokenLogprobs:
    """Log probabilities for these rows of logits [L, V]; tokens [L] are the sampled ones, width the top to report."""
    values = logits[rows].astype(np.float64)
    peaks = values.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):  # NaN where a row of scored tokens is not finite
        values -= peaks + np.log(np.exp(values - peaks).sum(axis=1, keepdims=True))
    chosen = np.take_along_axis(values, tokens[rows, None], axis=1)
    width = min(width, values.shape[1])
    # Sorted by id, so that the stable sort below puts lower ids first among equal values.
    candidates = np.sort(np.argpartition(-values, max(width - 1, 0), axis=1)[:, :width], axis=1)
    if width:
        # argpartition may miss a lower id that ties with the last of the top.
        last = np.take_along_axis(values, candidates, axis=1).min(axis=1)
        for row in np.flatnonzero((values >= last[:, None]).sum(axis=1) > width).tolist():
            candidates[row] = np.argsort(-values[row], kind="stable")[:width]
    order = np.argsort(-np.take_along_axis(values, candidates, axis=1), axis=1, kind="stable")
    top_ids = np.take_along_axis(candidates, order, axis=1)
    top = np.take_along_axis(values, top_ids, axis=1)
    return TokenLogprobs(
        rows=rows.astype(np.int32),
        chosen=chosen[:, 0].astype(np.float32),
        ranks=(values >= chosen).sum(axis=1).astype(np.int32),
        top_ids=top_ids.astype(np.int32),
        top=top.astype(np.float32),
    )


def with_named_tokens(
    found: TokenLogprobs, logits: NDArray[np.float32], tokens: NDArray[np.int32], named: Sequence[tuple[int, ...]]
) -> TokenLogprobs:
    """Give found's rows their named tokens for the top ones. logits [L, V]; tokens [L] are the sampled ones."""
    wider = (0, 0), (0, max(0, max(map(len, named)) - found.top.shape[1]))
    top_ids, top = np.pad(found.top_ids, wider, constant_values=-1), np.pad(found.top, wider, constant_values=np.nan)
    for place, (row, ids) in enumerate(zip(found.rows.tolist(), named, strict=True)):
        if ids:
            # The likeliest token is finite; the sampled one, of a row of scored tokens, need not be.
            known = tokens[row], found.chosen[place]
            if found.top.shape[1]:
                known = found.top_ids[place, 0], found.top[place, 0]
            log_sum = float(logits[row, known[0]]) - float(known[1])
            top_ids[place, : len(ids)], top[place, : len(ids)] = ids, logits[row, list(ids)] - np.float64(log_sum)
    return replace(found, top_ids=top_ids, top=top)


def score_in_blocks(scored: ScoredTokens, logits_of: Callable[[slice], NDArray[np.float32]]) -> TokenLogprobs:
    """Return `StepOutput.scored`. logits_of returns the logits [n, V] of a part of the scored tokens."""
    parts = []
    for first in range(0, len(scored.tokens), _BLOCK_ROWS):
        part = slice(first, first + _BLOCK_ROWS)
        next_ids = scored.next_ids[part]
        parts.append(token_logprobs(logits_of(part), next_ids, np.arange(len(next_ids)), scored.num_top))
    return TokenLogprobs(
        rows=np.arange(len(scored.tokens), dtype=np.int32),
        chosen=np.concatenate([part.chosen for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top=np.concatenate([part.top for part in parts]),
    )
