"""Runs sequences through a decoder that gives vectors or scores, in pages of their own, and its oracle."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.backend.forward_pass import PooledRows, StepBatch

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from penstock.backend.forward_pass import IBatchedForwardPass

PAGE = 16


def run(
    forward_pass: IBatchedForwardPass, rows: list[NDArray[np.int32]], kind: str, chunk: int = 1000
) -> list[NDArray[np.float32]]:
    """Each row in its own pages; in steps of at most chunk tokens a row."""
    results: dict[int, NDArray[np.float32]] = {}
    done = [0] * len(rows)
    while len(results) < len(rows):
        active = [i for i in range(len(rows)) if done[i] < len(rows[i])]
        active.sort(key=lambda i: min(chunk, len(rows[i]) - done[i]) > 1)  # rows of one token come first
        parts = [rows[i][done[i] : done[i] + chunk] for i in active]
        ends = [place for place, i in enumerate(active) if done[i] + len(parts[place]) == len(rows[i])]
        batch = StepBatch(
            input_ids=np.concatenate(parts),
            query_starts=np.cumsum([0, *map(len, parts)]).astype(np.int32),
            context_lens=np.array([done[i] for i in active], np.int32),
            page_table=np.array([[i * 8 + page for page in range(8)] for i in active], np.int32),
            slots=np.array(active, np.int32),
            logit_rows=np.empty(0, np.int32),
            pooled=PooledRows(np.array(ends, np.int32), (kind,) * len(ends), np.zeros(len(ends), np.int32))
            if ends
            else None,
        )
        pooled = forward_pass.sample(forward_pass.forward(batch), batch).wait().pooled or ()
        results |= {active[place]: vector.copy() for place, vector in zip(ends, pooled, strict=True)}
        for i, part in zip(active, parts, strict=True):
            done[i] += len(part)
    return [results[i] for i in range(len(rows))]


@torch.no_grad()
def last_hidden(model: Any, row: NDArray[np.int32]) -> NDArray[np.float32]:
    hidden: NDArray[np.float32] = model(input_ids=torch.from_numpy(row.astype(np.int64))[None])[0][0, -1].numpy()
    return hidden


YES, NO = 17, 200
"""Token ids of the words that a reranker without a head of its own compares."""


def write_words(path: Path) -> None:
    words = {"yes": YES, "no": NO, "maybe": 3}
    (path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": words, "unk_token": "maybe"}})
    )
