"""Log probabilities of sampled tokens, from the raw logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.forward_pass import TokenLogprobs

if TYPE_CHECKING:
    from numpy.typing import NDArray


def token_logprobs(
    logits: NDArray[np.float32], tokens: NDArray[np.int32], rows: NDArray[np.int64], width: int
) -> TokenLogprobs:
    """Log probabilities for these rows of logits [L, V]; tokens [L] are the sampled ones, width the top to report."""
    values = logits[rows].astype(np.float64)
    peaks = values.max(axis=1, keepdims=True)
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
    return TokenLogprobs(
        rows=rows.astype(np.int32),
        chosen=chosen[:, 0].astype(np.float32),
        ranks=(values >= chosen).sum(axis=1).astype(np.int32),
        top_ids=top_ids.astype(np.int32),
        top=np.take_along_axis(values, top_ids, axis=1).astype(np.float32),
    )
