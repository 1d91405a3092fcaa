"""Vectors of a step: checked as they come from the pass, and packed as their subscribers ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.backend.scheduling.step_plan import Plan
from penstock.shm.messages import Pooled

PER_TOKEN = frozenset(["token_embed", "token_classify"])
"""Kinds with a vector for each token."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """The result of one sequence as the pass computed it: full width, not normalised."""

    values: NDArray[np.float32]
    """[vectors, width]; for a sparse vector, [values that are not zero]."""
    indices: NDArray[np.int32] | None = None
    """The place of each value of a sparse vector, ascending; None for other vectors."""

    @property
    def num_vectors(self) -> int:
        return 1 if self.indices is not None else len(self.values)

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + (0 if self.indices is None else self.indices.nbytes)

    def copy(self) -> Vectors:
        """Copy the values, so that they do not hold a step's arrays."""
        return Vectors(self.values.copy(), None if self.indices is None else self.indices.copy())


def collect_vectors(
    plan: Plan, widths: Mapping[str, int], computed: tuple[NDArray[np.float32], ...] | None
) -> list[Vectors | None]:
    """The vectors of plan.pooled_rows; None for a vector with a value that is not finite.

    widths is `PassSpec.pooled`. Raises RuntimeError if the number or a shape differs from the pass's spec.
    """
    computed = computed or ()
    if len(computed) != len(plan.pooled_rows):
        raise RuntimeError(f"the pass computed {len(computed)} vectors for {len(plan.pooled_rows)} rows")
    if not computed:
        return []
    parts, kinds = [], []
    for index, values in zip(plan.pooled_rows, computed, strict=True):
        sequence = plan.sequences[index]
        if sequence.pooled is None:
            raise RuntimeError("a row without a pooled request has a vector; this is a bug")
        kind = sequence.pooled.kind
        shape = (len(sequence.tokens), widths[kind]) if kind in PER_TOKEN else (widths[kind],)
        if values.shape != shape or values.dtype != np.float32:
            raise RuntimeError(f'a vector of kind "{kind}" is {values.dtype} {list(values.shape)}, not {list(shape)}')
        parts.append(values.reshape(-1, widths[kind]))
        kinds.append(kind)
    if len(set(kinds) - PER_TOKEN) == len(set(kinds)) == 1 and kinds[0] != "sparse":  # most steps: one array for all
        matrix = np.concatenate(parts)
        bad = set(np.flatnonzero(~np.isfinite(matrix).all(axis=1)).tolist())
        return [None if row in bad else Vectors(matrix[row : row + 1]) for row in range(len(parts))]
    return [_checked(kind, values) for kind, values in zip(kinds, parts, strict=True)]


def _checked(kind: str, values: NDArray[np.float32]) -> Vectors | None:
    if not np.isfinite(values).all():
        return None
    if kind != "sparse":
        return Vectors(values)
    indices = np.flatnonzero(values[0]).astype(np.int32)
    return Vectors(values[0, indices], indices)


def pack_dense(vectors: list[Vectors], pooled: Pooled) -> list[bytes]:
    """The bytes of the values of each vector in the subscriber's form; all have the same width. Little-endian."""
    matrix = vectors[0].values if len(vectors) == 1 else np.concatenate([each.values for each in vectors])
    if pooled.num_dimensions:
        matrix = matrix[:, : pooled.num_dimensions]
    if pooled.normalize:
        matrix = _normalized(matrix)
    packed, row_bytes = matrix.tobytes(), 4 * matrix.shape[1]
    if len(vectors) == 1:
        return [packed]
    ends = np.cumsum([len(each.values) for each in vectors]) * row_bytes
    starts = [0, *ends[:-1].tolist()]
    return [packed[start:end] for start, end in zip(starts, ends.tolist(), strict=True)]


def pack_sparse(vectors: Vectors, pooled: Pooled) -> bytes:
    """The values of a sparse vector."""
    return (_normalized(vectors.values[None]) if pooled.normalize else vectors.values).tobytes()


def _normalized(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each row divided by its length; a row of zeros stays as it is. Lengths are computed in double precision."""
    lengths = np.sqrt(np.einsum("ij,ij->i", matrix, matrix, dtype=np.float64))
    lengths[lengths == 0] = 1.0
    normalized: NDArray[np.float32] = (matrix / lengths[:, None]).astype(np.float32)
    return normalized
