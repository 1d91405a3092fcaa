"""The arrays into which the kernels write log probabilities of scored tokens, block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.forward_pass import TokenLogprobs
from penstock.backend.passes.decoder.cpu.native_structs import ScoredRows

if TYPE_CHECKING:
    from penstock.backend.forward_pass import ScoredTokens


class ScoredBlocks:
    """`logprobs` is complete when the kernels have scored the rows of all blocks."""

    def __init__(self, scored: ScoredTokens, vocab_size: int) -> None:
        count, self._vocab_size = len(scored.tokens), vocab_size
        self._num_top = min(scored.num_top, vocab_size)
        self._next_ids = np.ascontiguousarray(scored.next_ids, np.int32)
        self.logprobs = TokenLogprobs(
            rows=np.arange(count, dtype=np.int32),
            chosen=np.empty(count, np.float32),
            ranks=np.empty(count, np.int32),
            top_ids=np.zeros((count, self._num_top), np.int32),
            top=np.zeros((count, self._num_top), np.float32),
        )

    def cut(self, first: int, num_rows: int, logits: int) -> ScoredRows:
        """Rows from `first` on, at most num_rows. logits is the address at which theirs begin."""
        part, out = slice(first, first + num_rows), self.logprobs
        next_ids = self._next_ids[part]
        return ScoredRows(
            logits=logits,
            next_ids=next_ids.ctypes.data,
            num_rows=len(next_ids),
            vocab=self._vocab_size,
            num_top=self._num_top,
            chosen=out.chosen[part].ctypes.data,
            ranks=out.ranks[part].ctypes.data,
            top_ids=out.top_ids[part].ctypes.data,
            top=out.top[part].ctypes.data,
        )
