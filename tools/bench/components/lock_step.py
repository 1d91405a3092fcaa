"""Runs sequences of one length in a pass on the CPU, one token of each per step, and returns the logits after every
token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.forward_pass import SamplingParams, SlotInit, StepBatch
from penstock.tools.bench.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from penstock.backend.passes.decoder.cpu.forward_pass import CpuDecoderPass

_PAGE_TOKENS = 32
_GREEDY = SamplingParams(temperature=0.0)


class LockStep:
    """Owns the pass's cache: one instance per pass. Sequences run one set after another."""

    def __init__(self, forward_pass: CpuDecoderPass, num_rows: int, num_tokens: int) -> None:
        """num_rows is at most the pass's max_running."""
        self._pass = forward_pass
        self._rows = np.arange(num_rows, dtype=np.int32)
        pages_per_row = -(-num_tokens // _PAGE_TOKENS)
        self._page_table = np.arange(num_rows * pages_per_row, dtype=np.int32).reshape(num_rows, pages_per_row)
        kv_dtype = next(iter(forward_pass.spec.kv_bytes_per_token))
        forward_pass.create_cache(num_rows * pages_per_row, _PAGE_TOKENS, kv_dtype)

    def logits(self, windows: NDArray[np.int32]) -> Iterator[NDArray[np.float32]]:
        """After each token of windows [rows, n]: [rows, vocab], valid until the next. Raises BenchError."""
        for place, tokens in enumerate(windows.T):
            yield self._step(tokens, place)

    def greedy(self, prompts: NDArray[np.int32], num_tokens: int) -> NDArray[np.int32]:
        """The most likely tokens after prompts [rows, n]: [rows, num_tokens]. Raises BenchError."""
        for place, tokens in enumerate(prompts.T):
            likeliest = self._step(tokens, place).argmax(axis=1).astype(np.int32)
        found = [likeliest]
        for place in range(prompts.shape[1], prompts.shape[1] + num_tokens - 1):
            found.append(self._step(found[-1], place).argmax(axis=1).astype(np.int32))
        return np.stack(found, axis=1)

    def _step(self, tokens: NDArray[np.int32], place: int) -> NDArray[np.float32]:
        """Compute the token at this place of every sequence."""
        rows = self._rows
        started = range(len(rows)) if place == 0 else ()
        logits = self._pass.forward(
            StepBatch(
                input_ids=np.ascontiguousarray(tokens),
                query_starts=np.arange(len(rows) + 1, dtype=np.int32),
                context_lens=np.full(len(rows), place, np.int32),
                page_table=self._page_table,
                slots=rows,
                logit_rows=rows,
                slot_inits=tuple(SlotInit(row, _GREEDY, tokens[row : row + 1], 1) for row in started),
            )
        )
        if not np.isfinite(logits).all():
            raise BenchError("the model's logits are not finite")
        return logits
