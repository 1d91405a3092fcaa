"""Runs rows through a pass as the engine does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backend.forward_pass import IBatchedForwardPass, PooledRows, StepBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

LENGTHS = (1, 2, 17, 40, 63)


def random_rows(lengths: Sequence[int] = LENGTHS, *, below: int = 96, seed: int = 3) -> list[NDArray[np.int32]]:
    """Token ids from 3 on: no padding, and no other special token."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, below, length).astype(np.int32) for length in lengths]


def make_batch(rows: Sequence[NDArray[np.int32]], kinds: Sequence[str], second_starts: Sequence[int]) -> StepBatch:
    count = len(rows)
    numbers = np.arange(count, dtype=np.int32)
    return StepBatch(
        input_ids=np.concatenate(rows),
        query_starts=np.cumsum([0, *map(len, rows)]).astype(np.int32),
        context_lens=np.zeros(count, np.int32),
        page_table=np.zeros((count, 0), np.int32),
        slots=numbers,
        logit_rows=np.empty(0, np.int32),
        pooled=PooledRows(numbers, tuple(kinds), np.array(second_starts, np.int32)),
    )


def run_rows(
    forward_pass: IBatchedForwardPass,
    rows: Sequence[NDArray[np.int32]],
    kind: str | Sequence[str],
    second_starts: Sequence[int] | None = None,
) -> list[NDArray[np.float32]]:
    """One result for each row, of one step."""
    kinds = [kind] * len(rows) if isinstance(kind, str) else kind
    batch = make_batch(rows, kinds, second_starts or [0] * len(rows))
    pooled = forward_pass.sample(forward_pass.forward(batch), batch).wait().pooled
    assert pooled is not None
    return [array.copy() for array in pooled]


def cosine(a: Any, b: Any) -> float:
    x, y = (np.asarray(values, np.float64).ravel() for values in (a, b))
    assert x.shape == y.shape
    return float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
