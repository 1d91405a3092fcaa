"""Makes steps for a forward pass without an engine. Each sequence has a fixed range of pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backend.forward_pass import FROM_SLOT, SamplingParams, SlotInit, StepBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.backend.forward_pass import PendingOutput

GREEDY = SamplingParams(temperature=0.0)


@dataclass
class Steps:
    """Batches of num_rows sequences: row r has slot r and the pages r · P … (r + 1) · P - 1, P being pages_per_row."""

    num_rows: int
    pages_per_row: int
    sampling: SamplingParams = GREEDY
    context_lens: NDArray[np.int32] = field(init=False)
    _takes_slots: bool = field(init=False, default=True)

    def __post_init__(self) -> None:
        self.context_lens = np.zeros(self.num_rows, np.int32)
        pages = np.arange(self.num_rows * self.pages_per_row, dtype=np.int32)
        self._page_table = pages.reshape(self.num_rows, self.pages_per_row)

    def decode(self) -> StepBatch:
        """A step with one token per row: the token that its slot sampled last."""
        return self._batch(np.full(self.num_rows, FROM_SLOT, np.int32), np.ones(self.num_rows, np.int32))

    def prefill(self, tokens: Sequence[NDArray[np.int32]], *, samples: bool = True) -> StepBatch:
        """A step with the next prompt tokens of each row, at least one each."""
        lengths = np.array([len(part) for part in tokens], np.int32)
        return self._batch(np.concatenate(tokens).astype(np.int32), lengths, samples=samples)

    def _batch(self, ids: NDArray[np.int32], lengths: NDArray[np.int32], *, samples: bool = True) -> StepBatch:
        slots = np.arange(self.num_rows, dtype=np.int32)
        nothing = np.zeros(1, np.int32)
        inits = tuple(SlotInit(slot, self.sampling, nothing, 1) for slot in slots.tolist()) if self._takes_slots else ()
        self._takes_slots = False
        batch = StepBatch(
            input_ids=ids,
            query_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
            context_lens=self.context_lens.copy(),
            page_table=self._page_table,
            slots=slots,
            logit_rows=slots if samples else slots[:0],
            slot_inits=inits,
        )
        self.context_lens += lengths
        return batch


def launch(forward_pass: Any, batch: StepBatch) -> PendingOutput:
    """Launch the step of a batch that samples."""
    pending: PendingOutput = forward_pass.sample(forward_pass.forward(batch), batch)
    return pending


def generate(
    forward_pass: Any, prompts: Sequence[NDArray[np.int32]], num_tokens: int, pages_per_row: int
) -> NDArray[np.int32]:
    """Return [rows, num_tokens] greedy tokens. Prompts have equal lengths of two tokens or more."""
    steps = Steps(len(prompts), pages_per_row)
    outputs = [launch(forward_pass, steps.prefill(prompts)).wait().token_ids]
    outputs += [launch(forward_pass, steps.decode()).wait().token_ids for _ in range(num_tokens - 1)]
    return np.stack(outputs, axis=1)
