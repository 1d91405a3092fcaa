"""Tokens whose embeddings are given: what a step says of them must agree, and on the host their rows are written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.forward_pass import FROM_EMBEDDINGS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.backend.forward_pass import EmbeddedTokens, StepBatch


def check_embeddings(batch: StepBatch) -> None:
    """Raises ValueError unless embeddings are given for exactly the tokens that are FROM_EMBEDDINGS."""
    if not batch.embeddings and batch.input_ids.min() != FROM_EMBEDDINGS:
        return
    given = [token for part in batch.embeddings for token in range(part.first, part.first + part.values.num_rows)]
    wanted = np.flatnonzero(batch.input_ids == FROM_EMBEDDINGS)
    if not np.array_equal(wanted, given):
        starts = [part.first for part in batch.embeddings]
        raise ValueError(
            f"embeddings of {len(given)} tokens are given, from {starts} on; {len(wanted)} tokens are FROM_EMBEDDINGS, "
            f"from {wanted[:1].tolist()} on"
        )


def place_embeddings(residual: NDArray[np.float32], embeddings: tuple[EmbeddedTokens, ...]) -> None:
    """Overwrites their rows of residual [T, hidden]."""
    for given in embeddings:
        residual[given.first : given.first + given.values.num_rows] = given.values.read()
