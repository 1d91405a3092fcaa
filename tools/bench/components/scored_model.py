"""Scores whole token sequences with the serving pass on the CPU, each computed in one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.backend.forward_pass import PassOptions, SamplingParams, ScoredTokens, SlotInit, StepBatch, TokenLogprobs
from penstock.backend.passes.decoder.cpu_pass import CpuDecoderPass
from penstock.tools.bench.errors import BenchError

PAGE_TOKENS = 32
_MAX_TOKENS = 512


class ScoredModel:
    """Owns the pass's cache."""

    def __init__(self, forward_pass: CpuDecoderPass, num_pages: int) -> None:
        self._pass = forward_pass
        self._pages = np.arange(num_pages, dtype=np.int32)
        kv_dtype = next(iter(forward_pass.spec.kv_bytes_per_token))
        forward_pass.create_cache(num_pages, PAGE_TOKENS, kv_dtype)

    def score(self, tokens: NDArray[np.int32], first: int) -> TokenLogprobs:
        """Score tokens[first:], each after all that precede it. Raises BenchError."""
        places = np.arange(first - 1, len(tokens) - 1, dtype=np.int32)
        batch = StepBatch(
            input_ids=tokens,
            query_starts=np.array([0, len(tokens)], np.int32),
            context_lens=np.zeros(1, np.int32),
            page_table=self._pages[None, : -(-len(tokens) // PAGE_TOKENS)],
            slots=np.zeros(1, np.int32),
            logit_rows=np.zeros(0, np.int32),
            slot_inits=(SlotInit(0, SamplingParams(temperature=0.0), tokens, len(tokens)),),
            scored=ScoredTokens(places, tokens[places + 1], 0),
        )
        scored = self._pass.sample(self._pass.forward(batch), batch).wait().scored
        if scored is None or not np.isfinite(scored.chosen).all():
            raise BenchError("the model's log probabilities are not finite")
        return scored

    def perplexity(self, windows: NDArray[np.int32]) -> float:
        """As llama-perplexity counts it: of the second half of each window, after its first token."""
        scores = [self.score(tokens, len(tokens) // 2 + 1).chosen for tokens in windows]
        return float(np.exp(-np.mean(scores, dtype=np.float64)))


@contextmanager
def scored_model(model_dir: Path, quantize: str = "none") -> Iterator[ScoredModel]:
    """A model for sequences of at most 512 tokens, as it is served. Raises StartupError."""
    options = PassOptions(max_running=1, max_batch_tokens=_MAX_TOKENS, quantize=quantize)
    forward_pass = CpuDecoderPass.load(model_dir, options)
    try:
        yield ScoredModel(forward_pass, _MAX_TOKENS // PAGE_TOKENS)
    finally:
        forward_pass.close()
