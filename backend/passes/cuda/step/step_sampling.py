"""Sampling of a step, from new slots to the results on their way to the host. One step at a time uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.backend.forward_pass import PendingOutput, SlotInit, StepBatch, TokenMasks
from penstock.backend.passes.cuda.device.device import Device
from penstock.backend.passes.cuda.device.launcher import Kernel
from penstock.backend.passes.cuda.device.transfers import Ints, Uplink
from penstock.backend.passes.cuda.step.device_sampler import (
    PLAIN,
    DeviceSampler,
    LogprobBuffers,
    SamplerFeatures,
    SlotArrays,
)
from penstock.backend.passes.cuda.step.draft_sampling import DraftSampling
from penstock.backend.passes.cuda.step.step_buffers import StepBuffers
from penstock.backend.passes.cuda.step.step_packing import NO_INTS, StepLimits
from penstock.backend.passes.cuda.step.step_results import ResultBuffers


@dataclass(frozen=True, slots=True)
class SamplingSizes:
    """Sizes of a model's sampling, fixed when the cache is created."""

    logits_width: int
    mask_ints: int
    """Ints of one mask per row, and of the table from row to mask."""
    max_update_ints: int
    """Most ints of new slots that travel with a step."""


class _Sent(NamedTuple):
    """The step's own parts on the device."""

    features: SamplerFeatures
    logprob_rows: Tensor
    named: Tensor
    """int32, as in `SamplerFeatures`."""
    scored_tokens: Tensor
    """int32 [S]; empty if nothing is scored."""
    scored_next_ids: Tensor
    """int32 [S], the token that follows each of scored_tokens."""
    draft_slots: Tensor
    draft_rows: Tensor
    """int32, as in `DraftSampling.pack`; empty without drafts."""


class StepSampling:
    """Owns the slots' sampler, the masks and the results. Call `parts` and `begin` before `sample` of the same step."""

    def __init__(
        self, device: Device, dtype: torch.dtype, limits: StepLimits, sizes: SamplingSizes, buffers: StepBuffers
    ) -> None:
        """dtype is that of the logits. buffers send the step; they stay the caller's."""
        self._limits = limits
        self._buffers = buffers
        self._slots = SlotArrays(limits.max_rows + limits.max_verified, sizes.logits_width, device.torch_device)
        self._sampler = DeviceSampler(device.launcher, self._slots, dtype)
        step = buffers.input_ids, buffers.logit_tokens, buffers.logit_rows.slots
        self._drafts = DraftSampling(device.launcher, self._slots, limits.max_rows, step)
        self._masks = Uplink(device, sizes.mask_ints)
        self._results = ResultBuffers(device, limits.max_rows, limits.max_tokens, limits.max_verified)
        self._max_update_ints = sizes.max_update_ints
        self._features: SamplerFeatures | None = None
        self._is_drawn = False
        """The graph of the step that began last draws its tokens."""
        self._sent: _Sent | None = None

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels to pass to `Launcher.prepare`."""
        return *self._sampler.kernels, *self._drafts.kernels

    @property
    def last_tokens(self) -> Tensor:
        """int32 [max_rows], by slot: the token sampled last."""
        return self._slots.last_tokens

    @property
    def is_scored(self) -> bool:
        """The step that began last scores tokens of prompts."""
        return self._begun().scored_tokens.shape[0] > 0

    @property
    def is_redrawable(self) -> bool:
        """A graph may draw the tokens of the step of the last `parts`; `sample` draws again if there are masks."""
        return self._features is not None and self._features.is_redrawable

    def capture(self, logits: Tensor) -> None:
        """Launch what draws the tokens of a step that `StepBuffers.load` sends as is_drawn."""
        num_rows = logits.shape[0]
        buffers, tokens = self._buffers, self._results.ints(slice(num_rows))
        drawn, context_lens = buffers.drawn_slots[:num_rows], buffers.logit_rows.context_lens[:num_rows]
        self._sampler.sample(logits, drawn, context_lens, PLAIN, tokens)

    def pack_slots(self, inits: tuple[SlotInit, ...]) -> tuple[Ints, int]:
        """Pack new slots to travel with the step. If they are too large, send them ahead and return nothing."""
        if not inits:
            return NO_INTS, 0
        updates = self._sampler.pack(inits)
        if updates.size <= self._max_update_ints:
            return updates, len(inits)
        for init in inits:
            (update,) = self._buffers.uplink.send([self._sampler.pack([init])])
            self._sampler.take_slots(update, 1)
        return NO_INTS, 0

    def parts(self, batch: StepBatch) -> list[Ints]:
        """Return the arrays to send with the step, for `begin`."""
        features = self._features = self._sampler.features(batch.slots[batch.logit_rows])
        scored = (NO_INTS, NO_INTS) if batch.scored is None else (batch.scored.tokens, batch.scored.next_ids)
        drafts = (NO_INTS, NO_INTS) if batch.drafts is None else self._drafts.pack(batch, batch.drafts)
        return [features.logprob_rows, features.named, *scored, *drafts]

    def begin(self, updates: Tensor, num_updates: int, parts: list[Tensor], *, is_drawn: bool) -> None:
        """Start a step with the results of `pack_slots` and `parts`, which are now on the device.

        is_drawn: as in `StepBuffers.load`.
        """
        if self._features is None:
            raise RuntimeError("a step's sampling begins after its `parts`")
        self._sent, self._is_drawn = _Sent(self._features, *parts), is_drawn
        if num_updates:
            self._sampler.take_slots(updates, num_updates)

    def sample(
        self,
        logits: Tensor,
        batch: StepBatch,
        masks: TokenMasks | None,
        logits_of: Callable[[Tensor], Tensor],
        doing: Callable[[], str],
    ) -> PendingOutput:
        """Sample the rows of logits [L + D, vocab_size], if the step's graph has not; doing names the step in errors.

        logits_of returns the logits of scored tokens int32 [n], for n at most max_rows; its next call overwrites them.
        """
        num_rows, sent, results = logits.shape[0], self._begun(), self._results
        features, scored = sent.features, (0, 0)
        if batch.scored is not None:
            scored = len(batch.scored.tokens), min(batch.scored.num_top, self._limits.vocab_size)
        layout = results.lay_out(batch, (features.logprob_rows.size, features.num_top), scored)
        tokens = results.ints(slice(num_rows))
        if masks is not None or not self._is_drawn:
            rows, placed = self._buffers.logit_rows.cut(num_rows), None
            if masks is not None:
                placed = self._send_masks(masks, num_rows)
            slots = rows.slots
            if batch.drafts is not None:
                slots = sent.draft_slots
                self._drafts.open(sent.draft_rows)
            self._sampler.sample(logits, slots, rows.context_lens, features, tokens, placed)
            if batch.drafts is not None:
                mask_rows = self._slots.no_mask_rows if placed is None else placed[0]
                self._drafts.accept(sent.draft_rows, mask_rows, tokens, results.ints(layout.accepted))
        if features.logprob_rows.size:
            out = results.logprobs(layout.sampled)
            self._sampler.logprobs(logits, tokens, sent.logprob_rows, out, sent.named, features.num_likeliest)
        if batch.scored is not None:
            self._score(sent, results.logprobs(layout.scored), logits_of)
        return results.fetch(layout, features.logprob_rows, doing)

    def _score(self, sent: _Sent, out: LogprobBuffers, logits_of: Callable[[Tensor], Tensor]) -> None:
        """Compute log probabilities of the scored tokens in blocks."""
        tokens, max_rows = sent.scored_tokens, self._limits.max_rows
        for first in range(0, len(tokens), max_rows):
            part = slice(first, first + max_rows)
            logits = logits_of(tokens[part])
            rows, own = self._results.row_numbers[: len(logits)], out.cut(part)
            self._sampler.logprobs(logits, sent.scored_next_ids[part], rows, own, tokens[:0], own.top_ids.shape[1])

    def _send_masks(self, masks: TokenMasks, num_rows: int) -> tuple[Tensor, Tensor]:
        which = np.full(num_rows, -1, np.int32)
        which[masks.rows] = np.arange(len(masks.rows))
        rows, bits = self._masks.send([which, masks.bits.view(np.int32)])
        return rows, bits

    def _begun(self) -> _Sent:
        if self._sent is None:
            raise RuntimeError("no step has begun")
        return self._sent
