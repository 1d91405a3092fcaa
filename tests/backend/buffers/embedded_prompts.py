"""Prompts of embeddings for the fake pass, and requests with them on the test bench."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.backend.passes.fake import EMBEDDING_SIZE, embedded_token
from penstock.shm.link.events import Submission
from penstock.shm.messages import (
    Generate,
    Sampling,
)
from tests.backend.buffers.test_shared_outputs import VOCAB
from tests.backend.harness import Bench, expected_tokens

GREEDY = Sampling(temperature=0.0)


def random_rows(num_rows: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(num_rows, EMBEDDING_SIZE)).astype(np.float32)


def fakes_tokens(rows: NDArray[np.float32], count: int, vocab_size: int = VOCAB) -> list[int]:
    """The tokens that the fake pass generates greedily after these embeddings."""
    return expected_tokens([embedded_token(row) for row in rows], count, vocab_size)


class StubLoan:
    """Rows of a client's buffer, like a `Loan`, that counts how often each is read."""

    device_reads = False

    def __init__(self, rows: NDArray[np.float32]) -> None:
        self.rows = rows
        self.num_reads: Counter[int] = Counter()

    def read_rows(self, first: int, num_rows: int) -> bytes:
        assert first + num_rows <= len(self.rows)
        self.num_reads.update(range(first, first + num_rows))
        return self.rows[first : first + num_rows].tobytes()


def submit_embedded(
    bench: Bench,
    rows: NDArray[np.float32],
    request_id: int = 0,
    max_tokens: int = 8,
    sampling: Sampling = GREEDY,
    **options: Any,
) -> StubLoan:
    loan = StubLoan(rows)
    message = Generate(
        request_id=request_id,
        tokens=b"\0\0\0\0",
        num_prompt_tokens=len(rows),
        max_tokens=max_tokens,
        sampling=sampling,
        **options,
    )
    bench.link.arrivals.append(Submission(1, message, b"", embeddings=loan))  # type: ignore[arg-type]
    return loan
