"""Sampling on the host, for passes whose logits are numpy arrays.

A sampled token is a function of (logits, the slot's SamplingParams, its tokens, seed, position) only: one uniform
number per token, keyed by the request's seed and the token's position (Philox), picks from the filtered distribution by
inverse CDF. Other rows of the batch cannot change it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.backend.forward_pass import (
    FROM_SLOT,
    ScoredTokens,
    SlotInit,
    StepBatch,
    StepOutput,
    TokenLogprobs,
    TokenMasks,
    positions_to_verify,
)
from penstock.backend.sampling.logprobs import score_in_blocks
from penstock.backend.sampling.numpy_sampler import NumpySampler


class IRowSampler(Protocol):
    """Samples rows of logits by the settings of their slots: `NumpySampler`, or kernels."""

    def take_slot(self, init: SlotInit) -> None:
        """A sequence takes the slot: its settings and tokens replace those of the slot's last owner."""

    def sample(
        self, logits: NDArray[np.float32], slots: Sequence[int], positions: Sequence[int], masks: TokenMasks | None
    ) -> tuple[NDArray[np.int32], TokenLogprobs | None]:
        """Return a token for each row of logits [L, V], NOT_FINITE where there is none, and what is to be reported.

        slots and positions of the tokens: [L]. Penalties count the tokens.
        """


class HostSampling:
    """The slot state of a host-side pass, and the sampler over it. A pass derives from it and implements `forward`.

    `forward` begins with `begin_step`, which initialises the step's new slots and resolves its token ids. Slot state is
    written in step order only, so a slot's next owner never sees what the previous one left.
    """

    def __init__(self, vocab_size: int, max_slots: int, sampler: IRowSampler | None = None) -> None:
        """sampler: None for the one in numpy."""
        self._last_tokens = array("i", bytes(4 * max_slots))
        self._sampler = NumpySampler(vocab_size, max_slots) if sampler is None else sampler

    def begin_step(self, batch: StepBatch) -> NDArray[np.int32]:
        """Return the step's token ids, [T] int32, with FROM_SLOT resolved; FROM_EMBEDDINGS stays.

        Call it once, at the start of `forward`. Works on lists: a step has read all weights since the last call, so
        each numpy function would be fetched from memory again.
        """
        for init in batch.slot_inits:
            self._sampler.take_slot(init)
        input_ids = batch.input_ids.tolist()
        if FROM_SLOT not in input_ids:
            return batch.input_ids
        starts, slots = batch.query_starts.tolist(), batch.slots.tolist()
        for index, token_id in enumerate(input_ids):
            if token_id == FROM_SLOT:
                input_ids[index] = self._last_tokens[slots[bisect_right(starts, index) - 1]]
        return np.array(input_ids, np.int32)

    def sample(self, logits: NDArray[np.float32], batch: StepBatch, masks: TokenMasks | None = None) -> StepOutput:
        """See `IBatchedForwardPass.sample`. logits: those of batch.logit_tokens, [L + D + S, V]."""
        if batch.scored is None:
            return self._sample_rows(logits, batch, masks)
        output = self._sample_rows(logits[: batch.num_sampled], batch, masks)
        return replace(output, scored=self.score(logits, batch.scored))

    def score(self, logits: NDArray[np.float32], scored: ScoredTokens) -> TokenLogprobs:
        """Return `StepOutput.scored` from the step's logits, [L + D + S, V]. Called after the tokens are sampled.

        A pass whose `forward` returns [L + D, V] computes the other logits here.
        """
        return score_in_blocks(scored, logits[len(logits) - len(scored.tokens) :].__getitem__)

    def _sample_rows(self, logits: NDArray[np.float32], batch: StepBatch, masks: TokenMasks | None) -> StepOutput:
        slots, positions = sampled_places(batch)
        if not slots:
            return StepOutput(np.empty(0, np.int32))
        if batch.drafts is not None:
            return self._verify(logits, batch, slots, positions, masks)
        tokens, logprobs = self._sampler.sample(logits, slots, positions, masks)
        for slot, token in zip(slots, tokens.tolist(), strict=True):
            self._last_tokens[slot] = max(token, 0)
        return StepOutput(tokens, logprobs)

    def _verify(
        self,
        logits: NDArray[np.float32],
        batch: StepBatch,
        slots: list[int],
        ends: list[int],
        masks: TokenMasks | None,
    ) -> StepOutput:
        """Sample rows of which some have drafts, in turns: each samples the next token of the rows whose drafts were
        all drawn so far. So penalties count exactly the tokens of the sequence.

        ends: the positions of the tokens after the last drafts, [L].
        """
        num_drafts = [] if batch.drafts is None else batch.drafts.tolist()
        places, input_ids = positions_to_verify(num_drafts), batch.input_ids.tolist()
        row_ends = batch.query_starts[1:][batch.logit_rows].tolist()
        mask_of = {} if masks is None else {row: index for index, row in enumerate(masks.rows.tolist())}
        tokens, num_accepted, live = np.empty(len(slots), np.int32), [0] * len(slots), list(range(len(slots)))
        reported = None
        while live:
            at = [places[row][num_accepted[row]] for row in live]
            positions = [ends[row] - num_drafts[row] + num_accepted[row] for row in live]
            its_logits = logits[at[0] : at[0] + 1] if len(at) == 1 else logits[at]
            drawn, logprobs = self._sampler.sample(
                its_logits, [slots[row] for row in live], positions, _masks_at(masks, mask_of, at)
            )
            reported = reported or logprobs  # no row with drafts reports any, so only the first turn brings them
            tokens[live] = drawn
            still = []
            for row, place, token in zip(live, at, drawn.tolist(), strict=True):
                left = num_drafts[row] - num_accepted[row]
                is_draft = left > 0 and token == input_ids[row_ends[row] - left]
                if is_draft and (place not in mask_of or places[row][num_accepted[row] + 1] in mask_of):
                    num_accepted[row] += 1
                    still.append(row)
            live = still
        for slot, token in zip(slots, tokens.tolist(), strict=True):
            self._last_tokens[slot] = max(token, 0)
        return StepOutput(tokens, reported, num_accepted=tuple(num_accepted))

    def host_logits(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        return logits


def sampled_places(batch: StepBatch) -> tuple[list[int], list[int]]:
    """Slots and positions of the tokens that follow the last ones of batch.logit_rows."""
    rows, slots = batch.logit_rows.tolist(), batch.slots.tolist()
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    return [slots[row] for row in rows], [contexts[row] + starts[row + 1] - starts[row] for row in rows]


def _masks_at(masks: TokenMasks | None, mask_of: dict[int, int], places: list[int]) -> TokenMasks | None:
    """Return the masks of some places, as the rows of these. mask_of: place → index of its mask."""
    found = [(row, mask_of[place]) for row, place in enumerate(places) if place in mask_of]
    if masks is None or not found:
        return None
    rows, indices = zip(*found, strict=True)
    return TokenMasks(np.array(rows, np.int32), masks.bits[list(indices)])
