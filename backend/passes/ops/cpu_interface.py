"""What the operations on the CPU have beside those of `Ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.backend.forward_pass import ScoredTokens, StepBatch, TokenLogprobs
from penstock.backend.passes.ops.interface import Array, Forward, LinearAdapters, Ops, Step
from penstock.backend.sampling.sampler import IRowSampler


class CpuCache(Protocol):
    def save(self, page: int, content: NDArray[np.uint8]) -> None:
        """Copy a page of all layers to content, [bytes of a page]."""

    def restore(self, page: int, content: NDArray[np.uint8]) -> None:
        """Copy content, which `save` has written, to a page."""


class CpuOps(Ops, Protocol):
    """The operations on the CPU, which also own the KV cache and the step's form."""

    @property
    def adapters(self) -> LinearAdapters: ...

    @property
    def make_sampler(self) -> Callable[[int], IRowSampler] | None:
        """Makes a sampler for max_slots, which can be used until the operations are closed; None if they have none."""

    @property
    def cache(self) -> CpuCache: ...

    def create_cache(self, num_layers: int, num_pages: int, page_size_tokens: int, kv_dtype: str) -> None:
        """num_layers: `LayerGroups.num_layers`."""

    def begin_step(self, batch: StepBatch, input_ids: NDArray[np.int32]) -> Step:
        """Copy batch.page_copies and prepare the rows.

        input_ids [T] are batch.input_ids with every FROM_SLOT resolved and every FROM_EMBEDDINGS replaced by any token.
        """

    def run_step(self, step: Step, forward: Forward, *, needs_logits: bool) -> NDArray[np.float32] | None:
        """Return the result of forward, the model's operations, for a step that was begun.

        forward may be called for the first step only, if its operations are recorded: it must be the same function each
        time, and its operations may depend on needs_logits, but not on the step.
        """

    def score(
        self, normed: Array, first: int, scored: ScoredTokens, logits_of: Callable[[Array], NDArray[np.float32]]
    ) -> TokenLogprobs:
        """Return `StepOutput.scored` of the last step.

        Its tokens' rows of normed, the final norm's result, begin at `first`. logits_of is `DecoderModel.logits`; like
        `forward` in `run_step`, it may be called for the first step only. The result of `run_step` may be overwritten.
        """

    def normed_rows(self, normed: Array, num_rows: int) -> NDArray[np.float32]:
        """A copy of the first rows of normed, the latest result of `norm`: [num_rows, hidden] fp32."""
