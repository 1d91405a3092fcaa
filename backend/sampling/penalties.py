"""Repetition, presence and frequency penalties. See `SamplingParams` for their definitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.forward_pass import FROM_EMBEDDINGS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.backend.forward_pass import SamplingParams


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
