"""Sampling on the host, vectorised over rows, for passes whose logits are numpy arrays.

A sampled token is a function of (logits, the slot's SamplingParams, its tokens, seed, position) only: one uniform
number per token, keyed by the request's seed and the token's position (`philox_uniform`), picks from the filtered
distribution by inverse CDF. Other rows of the batch cannot change it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.forward_pass import (
    FROM_SLOT,
    NOT_FINITE,
    ScoredTokens,
    SlotInit,
    StepBatch,
    StepOutput,
    TokenLogprobs,
    TokenMasks,
)
from penstock.backend.sampling.filters import Penalties, apply_penalties, filtered_weights, masked_rows
from penstock.backend.sampling.logprobs import score_in_blocks, token_logprobs

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)


def philox_uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position) pair, [n] float64 with 53 random bits.

    Philox4x32-10, a counter-based generator without a state (Salmon et al., SC 2011).
    """
    counters = positions.astype(np.uint64)
    c0, c1 = counters & _LOW32, counters >> _SHIFT32
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    k0, k1 = seeds & _LOW32, seeds >> _SHIFT32
    for _ in range(10):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT32) ^ c1 ^ k0, p1 & _LOW32, (p0 >> _SHIFT32) ^ c3 ^ k1, p0 & _LOW32
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW32, (k1 + _KEY_STEPS[1]) & _LOW32
    bits = (c0 << np.uint64(21)) | (c1 >> np.uint64(11))
    return np.asarray(bits.astype(np.float64) * 2.0**-53, dtype=np.float64)


_CDF_BLOCK = 256
_MIN_TEMPERATURE = np.float32(1e-6)
"""Below this all mass is on the largest logits anyway, and smaller divisors overflow."""


class HostSampling:
    """The slot state of a host-side pass, and the sampler over it. A pass derives from it and implements `forward`.

    `forward` begins with `begin_step`, which initialises the step's new slots and resolves its token ids. Slot state is
    written in step order only, so a slot's next owner never sees what the previous one left.
    """

    def __init__(self, vocab_size: int, max_slots: int) -> None:
        self._vocab_size = vocab_size
        self._last_tokens = [0] * max_slots
        self._temperature = np.zeros(max_slots, np.float32)
        self._top_p = np.ones(max_slots, np.float64)
        self._top_k = np.zeros(max_slots, np.int64)
        self._min_p = np.zeros(max_slots, np.float64)
        self._typical_p = np.ones(max_slots, np.float64)
        self._num_logprobs = np.full(max_slots, -1, np.int64)
        self._seed = np.zeros(max_slots, np.uint64)
        self._special_slots: set[int] = set()
        """Slots whose token is not simply the largest logit, or that report log probabilities."""
        # Only for slots that have penalties or a bias, which are few.
        self._penalties: dict[int, Penalties] = {}
        self._bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._logprob_token_ids: dict[int, tuple[int, ...]] = {}

    def begin_step(self, batch: StepBatch) -> NDArray[np.int32]:
        """Return the step's token ids, [T] int32, with FROM_SLOT resolved; FROM_EMBEDDINGS stays.

        Call it once, at the start of `forward`. Works on lists: a step has read all weights since the last call, so
        each numpy function would be fetched from memory again.
        """
        for init in batch.slot_inits:
            self._take_slot(init)
        input_ids = batch.input_ids.tolist()
        if FROM_SLOT not in input_ids:
            return batch.input_ids
        starts, slots = batch.query_starts.tolist(), batch.slots.tolist()
        for index, token_id in enumerate(input_ids):
            if token_id == FROM_SLOT:
                input_ids[index] = self._last_tokens[slots[bisect_right(starts, index) - 1]]
        return np.array(input_ids, np.int32)

    def sample(self, logits: NDArray[np.float32], batch: StepBatch, masks: TokenMasks | None = None) -> StepOutput:
        """See `IBatchedForwardPass.sample`. logits: those of batch.logit_tokens, [L + S, V]."""
        if batch.scored is None:
            return self._sample_rows(logits, batch, masks)
        output = self._sample_rows(logits[: len(batch.logit_rows)], batch, masks)
        return replace(output, scored=self.score(logits, batch.scored))

    def score(self, logits: NDArray[np.float32], scored: ScoredTokens) -> TokenLogprobs:
        """Return `StepOutput.scored` from the step's logits, [L + S, V]. Called after the tokens are sampled.

        A pass whose `forward` returns [L, V] computes the other logits here.
        """
        return score_in_blocks(scored, logits[len(logits) - len(scored.tokens) :].__getitem__)

    def _sample_rows(self, logits: NDArray[np.float32], batch: StepBatch, masks: TokenMasks | None) -> StepOutput:
        all_slots = batch.slots.tolist()
        slot_list = [all_slots[row] for row in batch.logit_rows.tolist()]
        if masks is None and self._special_slots.isdisjoint(slot_list):
            return StepOutput(self._largest(logits, slot_list))
        rows = batch.logit_rows
        slots = batch.slots[rows]
        positions = (batch.context_lens + np.diff(batch.query_starts))[rows].astype(np.int64)
        raw_logits = logits
        if self._bias or self._penalties:
            logits = self._adjusted(logits, slots)
        tokens: NDArray[np.int32] = np.argmax(logits, axis=1).astype(np.int32)
        peaks = logits[np.arange(len(tokens)), tokens]
        is_random = self._temperature[slots] > 0
        masked: dict[int, NDArray[np.float32]] = {}
        for row, values in masked_rows(logits, masks) if masks is not None else ():
            tokens[row] = values.argmax()
            peaks[row] = values[tokens[row]]
            if is_random[row]:
                masked[row] = values.copy()
        random_rows = np.flatnonzero(is_random & np.isfinite(peaks))
        if len(random_rows):
            drawn_from = logits[random_rows]
            for place, row in enumerate(random_rows.tolist()):
                if row in masked:
                    drawn_from[place] = masked[row]
            tokens[random_rows] = self._draw(drawn_from, peaks[random_rows], slots[random_rows], positions[random_rows])
        tokens[~np.isfinite(peaks)] = NOT_FINITE
        for slot, token in zip(slot_list, tokens.tolist(), strict=True):
            self._last_tokens[slot] = max(token, 0)
            if slot in self._penalties and token >= 0:
                self._penalties[slot].count(token)
        reporting = np.flatnonzero((self._num_logprobs[slots] >= 0) & (tokens >= 0))
        if not len(reporting):
            return StepOutput(tokens)
        width = int(self._num_logprobs[slots[reporting]].max())
        named = [self._logprob_token_ids.get(slot_list[row], ()) for row in reporting.tolist()]
        return StepOutput(tokens, token_logprobs(raw_logits, tokens, reporting, width, named))

    def host_logits(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        return logits

    def _largest(self, logits: NDArray[np.float32], slots: list[int]) -> NDArray[np.int32]:
        """The tokens of a step that is greedy in all rows. Calls few functions, as `begin_step` does."""
        tokens = logits.argmax(axis=1).tolist()
        for row, slot in enumerate(slots):
            if not math.isfinite(logits.item(row, tokens[row])):
                tokens[row] = NOT_FINITE
            self._last_tokens[slot] = max(tokens[row], 0)
        return np.array(tokens, np.int32)

    def _take_slot(self, init: SlotInit) -> None:
        slot, params = init.slot, init.sampling
        self._temperature[slot] = params.temperature
        self._top_p[slot] = params.top_p
        self._top_k[slot] = params.top_k
        self._min_p[slot] = params.min_p
        self._typical_p[slot] = params.typical_p
        self._num_logprobs[slot] = params.num_logprobs
        self._logprob_token_ids.pop(slot, None)
        if params.logprob_token_ids:
            self._logprob_token_ids[slot] = params.logprob_token_ids
        self._seed[slot] = params.seed
        self._special_slots.discard(slot)
        self._bias.pop(slot, None)
        if params.logit_bias:
            ids = np.array([token_id for token_id, _ in params.logit_bias], np.int64)
            self._bias[slot] = ids, np.array([bias for _, bias in params.logit_bias], np.float32)
        self._penalties.pop(slot, None)
        if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
            self._penalties[slot] = Penalties(params, init.token_ids, init.num_prompt_tokens, self._vocab_size)
        if params.temperature > 0 or params.num_logprobs >= 0 or slot in self._bias or slot in self._penalties:
            self._special_slots.add(slot)

    def _adjusted(self, logits: NDArray[np.float32], slots: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return logits with bias and penalties: a copy if any row has them."""
        penalised = [row for row, slot in enumerate(slots.tolist()) if slot in self._penalties]
        biased = [row for row, slot in enumerate(slots.tolist()) if slot in self._bias]
        if not penalised and not biased:
            return logits
        logits = logits.copy()
        if penalised:
            logits[penalised] = apply_penalties(
                logits[penalised], [self._penalties[int(slots[row])] for row in penalised]
            )
        for row in biased:
            ids, values = self._bias[int(slots[row])]
            np.add.at(logits[row], ids, values)
        return logits

    def _draw(
        self,
        logits: NDArray[np.float32],
        peaks: NDArray[np.float32],
        slots: NDArray[np.int32],
        positions: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """One token for each row at temperature > 0. logits [n, V] may be overwritten; peaks are its maxima, [n]."""
        scaled = logits
        scaled -= peaks[:, None]
        scaled /= np.maximum(self._temperature[slots], _MIN_TEMPERATURE)[:, None]
        weights = filtered_weights(
            scaled,
            top_k=self._top_k[slots],
            typical_p=self._typical_p[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
        )
        return _inverse_cdf(weights, philox_uniform(self._seed[slots], positions))


def _inverse_cdf(weights: NDArray[np.float32], uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return [n]: the first index of each row at which the running sum of weights [n, V] exceeds uniform × its sum.

    Works in two levels, so only one block of each row is summed element by element.
    """
    n, vocab_size = weights.shape
    num_blocks = -(-vocab_size // _CDF_BLOCK)
    if num_blocks * _CDF_BLOCK != vocab_size:
        weights = np.concatenate([weights, np.zeros((n, num_blocks * _CDF_BLOCK - vocab_size), np.float32)], axis=1)
    blocks = weights.reshape(n, num_blocks, _CDF_BLOCK)
    cdf = np.cumsum(blocks.sum(axis=2, dtype=np.float64), axis=1)
    target = uniform * cdf[:, -1]
    rows = np.arange(n)
    block = np.argmax(cdf > target[:, None], axis=1)
    before = np.where(block > 0, cdf[rows, block - 1], 0.0)
    inside = np.cumsum(blocks[rows, block].astype(np.float64), axis=1) + before[:, None]
    # Rounding may put the target just above the block's own running sum: then take its last token with any weight.
    above = inside > target[:, None]
    last_weighted = _CDF_BLOCK - 1 - np.argmax(blocks[rows, block][:, ::-1] > 0, axis=1)
    return np.asarray(block * _CDF_BLOCK + np.where(above.any(axis=1), above.argmax(axis=1), last_weighted))
