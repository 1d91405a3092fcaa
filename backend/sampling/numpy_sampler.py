"""The sampler in numpy, vectorised over rows, where there are no kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.backend.forward_pass import NOT_FINITE, SamplingParams, SlotInit, TokenLogprobs, TokenMasks
from penstock.backend.sampling.filters import (
    Penalties,
    apply_penalties,
    dynamic_temperature,
    exclude_top,
    filtered_weights,
    masked_rows,
)
from penstock.backend.sampling.logprobs import token_logprobs, with_named_tokens
from penstock.backend.sampling.repetition import Repetitions

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)


_EXCLUSION_STREAM = 1
"""XTC's random numbers are not related to those that draw the tokens, which have stream 0."""


def philox_uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64], stream: int = 0) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position) pair, [n] float64 with 53 random bits.

    Philox4x32-10, a counter-based generator without a state (Salmon et al., SC 2011).
    """
    counters = positions.astype(np.uint64)
    c0, c1 = counters & _LOW32, counters >> _SHIFT32
    c2, c3 = np.full_like(c0, stream), np.zeros_like(c0)
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


class NumpySampler:
    """Implements `IRowSampler`."""

    def __init__(self, vocab_size: int, max_slots: int) -> None:
        self._vocab_size = vocab_size
        self._temperature = np.zeros(max_slots, np.float32)
        self._top_p = np.ones(max_slots, np.float64)
        self._top_k = np.zeros(max_slots, np.int64)
        self._min_p = np.zeros(max_slots, np.float64)
        self._typical_p = np.ones(max_slots, np.float64)
        self._top_n_sigma = np.zeros(max_slots, np.float64)
        self._num_logprobs = np.full(max_slots, -1, np.int64)
        self._seed = np.zeros(max_slots, np.uint64)
        self._special_slots: set[int] = set()
        """Slots whose token is not simply the largest logit, or that report log probabilities."""
        # Only for slots that have them, which are few.
        self._tempered_last: dict[int, SamplingParams] = {}
        """Slots with XTC or a dynamic temperature."""
        self._repetitions: dict[int, Repetitions] = {}
        self._penalties: dict[int, Penalties] = {}
        self._bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._logprob_token_ids: dict[int, tuple[int, ...]] = {}

    def take_slot(self, init: SlotInit) -> None:
        slot, params = init.slot, init.sampling
        self._temperature[slot] = params.temperature
        self._top_p[slot] = params.top_p
        self._top_k[slot] = params.top_k
        self._min_p[slot] = params.min_p
        self._typical_p[slot] = params.typical_p
        self._top_n_sigma[slot] = params.top_n_sigma
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
        if params.has_penalties:
            self._penalties[slot] = Penalties(params, init.token_ids, init.num_prompt_tokens, self._vocab_size)
        self._tempered_last.pop(slot, None)
        if params.xtc_probability or params.dynatemp_range:
            self._tempered_last[slot] = params
        self._repetitions.pop(slot, None)
        if params.dry_multiplier:
            self._repetitions[slot] = Repetitions(params, init.token_ids, self._vocab_size)
        changes_logits = any(slot in changes for changes in (self._bias, self._penalties, self._repetitions))
        if params.temperature > 0 or params.num_logprobs >= 0 or changes_logits:
            self._special_slots.add(slot)

    def sample(
        self, logits: NDArray[np.float32], slots: Sequence[int], positions: Sequence[int], masks: TokenMasks | None
    ) -> tuple[NDArray[np.int32], TokenLogprobs | None]:
        if masks is None and self._special_slots.isdisjoint(slots):
            return _largest(logits), None
        return self._sample_rows(logits, np.array(slots, np.int32), np.array(positions, np.int64), masks)

    def _sample_rows(
        self,
        logits: NDArray[np.float32],
        slots: NDArray[np.int32],
        positions: NDArray[np.int64],
        masks: TokenMasks | None,
    ) -> tuple[NDArray[np.int32], TokenLogprobs | None]:
        raw_logits = logits
        if self._bias or self._penalties or self._repetitions:
            logits = self._adjusted(logits, slots, positions)
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
        for slot, position, token in zip(slots.tolist(), positions.tolist(), tokens.tolist(), strict=True):
            if slot in self._penalties and token >= 0:
                self._penalties[slot].count(token)
            if slot in self._repetitions:
                self._repetitions[slot].make_room(position)
                self._repetitions[slot].tokens[position] = token
        reporting = np.flatnonzero((self._num_logprobs[slots] >= 0) & (tokens >= 0))
        if not len(reporting):
            return tokens, None
        width = int(self._num_logprobs[slots[reporting]].max())
        named = [self._logprob_token_ids.get(slot, ()) for slot in slots[reporting].tolist()]
        found = token_logprobs(raw_logits, tokens, reporting, width)
        return tokens, with_named_tokens(found, raw_logits, tokens, named) if any(named) else found

    def _adjusted(
        self, logits: NDArray[np.float32], slots: NDArray[np.int32], positions: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Return logits with bias and penalties: a copy if any row has them."""
        repeating = [row for row, slot in enumerate(slots.tolist()) if slot in self._repetitions]
        penalised = [row for row, slot in enumerate(slots.tolist()) if slot in self._penalties]
        biased = [row for row, slot in enumerate(slots.tolist()) if slot in self._bias]
        if not penalised and not biased and not repeating:
            return logits
        logits = logits.copy()
        if penalised:
            logits[penalised] = apply_penalties(
                logits[penalised], [self._penalties[int(slots[row])] for row in penalised]
            )
        for row in repeating:
            self._repetitions[int(slots[row])].penalise(logits[row], int(positions[row]))
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
        temperature = np.maximum(self._temperature[slots], _MIN_TEMPERATURE)
        temperature[[slot in self._tempered_last for slot in slots.tolist()]] = 1.0
        scaled /= temperature[:, None]
        weights = filtered_weights(
            scaled,
            top_k=self._top_k[slots],
            typical_p=self._typical_p[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            top_n_sigma=self._top_n_sigma[slots],
        )
        excludes = philox_uniform(self._seed[slots], positions, _EXCLUSION_STREAM)
        for row, slot in enumerate(slots.tolist()):
            if (params := self._tempered_last.get(slot)) is not None:
                weights[row] = _tempered_last(
                    scaled[row], params, excludes=bool(excludes[row] < params.xtc_probability)
                )
        return _inverse_cdf(weights, philox_uniform(self._seed[slots], positions))


def _tempered_last(kept: NDArray[np.float32], params: SamplingParams, *, excludes: bool) -> NDArray[np.float32]:
    """Weights [V] of one row of kept logits, which are changed in place; other tokens are -inf."""
    if excludes:
        exclude_top(kept, params.xtc_threshold)
    temperature = params.temperature
    if params.dynatemp_range:
        temperature = dynamic_temperature(kept, temperature, params.dynatemp_range, params.dynatemp_exponent)
    scaled = (kept - kept.max()) / np.maximum(np.float32(temperature), _MIN_TEMPERATURE)
    return np.asarray(np.exp(scaled), np.float32)


def _largest(logits: NDArray[np.float32]) -> NDArray[np.int32]:
    """The tokens of a step that is greedy in all rows. Calls few functions, as `HostSampling.begin_step` does."""
    tokens = logits.argmax(axis=1).tolist()
    for row, token in enumerate(tokens):
        if not math.isfinite(logits.item(row, token)):
            tokens[row] = NOT_FINITE
    return np.array(tokens, np.int32)


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
