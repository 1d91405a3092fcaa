"""Prompt embeddings: check that a step's embeddings match its tokens, and write them to the residual stream."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.backend.forward_pass import FROM_EMBEDDINGS, EmbeddedTokens, StepBatch


def check_embeddings(batch: StepBatch) -> None:
    """Raises ValueError unless the step has embeddings for exactly its FROM_EMBEDDINGS tokens."""
    if not batch.embeddings and FROM_EMBEDDINGS not in batch.input_ids.tolist():
        return
    given = [token for part in batch.embeddings for token in range(part.first, part.first + part.values.num_rows)]
    expected = np.flatnonzero(batch.input_ids == FROM_EMBEDDINGS)
    if not np.array_equal(expected, given):
        starts = [part.first for part in batch.embeddings]
        raise ValueError(
            f"the step has embeddings for {len(given)} tokens, from {starts} on; {len(expected)} tokens are "
            f"FROM_EMBEDDINGS, from {expected[:1].tolist()} on"
        )


def place_embeddings(residual: NDArray[np.float32], embeddings: tuple[EmbeddedTokens, ...], scale: float) -> None:
    """Overwrite the rows of residual [T, hidden] that have embeddings, with these × scale."""
    for given in embeddings:
        rows = given.values.read()[:, : residual.shape[1]]
        residual[given.first : given.first + given.values.num_rows] = rows * np.float32(scale)


def add_picture_rows(residual: NDArray[np.float32], embeddings: tuple[EmbeddedTokens, ...], layer: int) -> None:
    """Add to the rows of residual [T, hidden] what pictures add behind the layer, see `PassSpec.picture_layers`."""
    width = residual.shape[1]
    for given in embeddings:
        rows = given.values.read()[:, (1 + layer) * width : (2 + layer) * width]
        if rows.size:  # other embeddings have nothing to add
            residual[given.first : given.first + given.values.num_rows] += rows
