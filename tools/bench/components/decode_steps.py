"""Decode steps without an engine: every sequence of a batch computes one token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from penstock.backend.forward_pass import SamplingParams, SlotInit, StepBatch
from penstock.backend.passes.cpu.native_ops import NativeOps

_CACHED_BYTE = 0x3C
"""Repeated, it is about 0.01 in fp32 and in bf16, and 60 with the scale 1.06 in q8_0."""

GREEDY = SamplingParams(temperature=0.0)


def decode_steps(
    batch_size: int, context_tokens: int, page_size_tokens: int, num_steps: int, sampling: SamplingParams = GREEDY
) -> Iterator[StepBatch]:
    """Yield the same step num_steps times. Row r owns the pages from r * pages_per_row; their content is arbitrary."""
    pages_per_row = -(-(context_tokens + 1) // page_size_tokens)
    rows = np.arange(batch_size, dtype=np.int32)
    page_table = (rows[:, None] * pages_per_row + np.arange(pages_per_row)).astype(np.int32)
    prompt = np.ones(context_tokens, np.int32)
    inits = tuple(SlotInit(slot, sampling, prompt, context_tokens) for slot in range(batch_size))
    for index in range(num_steps):
        yield StepBatch(
            input_ids=rows + 1,
            query_starts=np.arange(batch_size + 1, dtype=np.int32),
            context_lens=np.full(batch_size, context_tokens, np.int32),
            page_table=page_table,
            slots=rows,
            logit_rows=rows,
            slot_inits=inits if index == 0 else (),
        )


def commit_cache(ops: object) -> None:
    """Write all of the native kernels' cache: pages that were never written share one page of zeros."""
    if isinstance(ops, NativeOps):
        for pages in ops.cache:
            pages.fill_(_CACHED_BYTE)
