"""Sampling on the host, vectorised over rows, for passes whose logits are numpy arrays.

A sampled token is a function of (logits, the slot's SamplingParams, its tokens, seed, position) only: one uniform
number per token from a counter-based generator (Philox4x32-10, Salmon et al., SC 2011), keyed by the request's seed and
the token's position, picks from the filtered distribution by inverse CDF. Who shares the batch cannot matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.forward_pass import (
    FROM_EMBEDDINGS,
    FROM_SLOT,
    NOT_FINITE,
    SamplingParams,
    SlotInit,
    StepBatch,
    StepOutput,
    TokenLogprobs,
    TokenMasks,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_CDF_BLOCK = 256
_NUCLEUS_GUESS = 1024
_MIN_TEMPERATURE = np.float32(1e-6)
"""Below it all mass is on the largest logits anyway, and smaller divisors overflow."""

_PHILOX_M = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_PHILOX_W = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)

_ALLOWED = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").view(np.bool_)
_CEILINGS = np.where(_ALLOWED, np.float32(np.inf), np.float32(-np.inf))
"""[256, 8] for each byte of a mask the most that the logits of its eight tokens may be."""


def philox_uniform(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position) pair, [n] float64 with 53 random bits."""
    counters = positions.astype(np.uint64)
    c0, c1 = counters & _LOW32, counters >> _SHIFT32
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    k0, k1 = seeds & _LOW32, seeds >> _SHIFT32
    for _ in range(10):
        p0, p1 = _PHILOX_M[0] * c0, _PHILOX_M[1] * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT32) ^ c1 ^ k0, p1 & _LOW32, (p0 >> _SHIFT32) ^ c3 ^ k1, p0 & _LOW32
        k0, k1 = (k0 + _PHILOX_W[0]) & _LOW32, (k1 + _PHILOX_W[1]) & _LOW32
    bits = (c0 << np.uint64(21)) | (c1 >> np.uint64(11))
    return np.asarray(bits.astype(np.float64) * 2.0**-53, dtype=np.float64)


class HostSampling:
    """The slot state of a host-side pass, and the sampler over it. A pass derives from it and implements `forward`.

    `forward` begins with `begin_step`, which takes in the step's new slots and resolves its token ids. Slot state is
    written in step order only, so a slot's next owner never sees what its last one left.
    """

    def __init__(self, vocab_size: int, max_slots: int) -> None:
        self._vocab_size = vocab_size
        self._last_tokens = np.zeros(max_slots, np.int32)
        self._temperature = np.zeros(max_slots, np.float32)
        self._top_p = np.ones(max_slots, np.float64)
        self._top_k = np.zeros(max_slots, np.int64)
        self._min_p = np.zeros(max_slots, np.float64)
        self._typical_p = np.ones(max_slots, np.float64)
        self._num_logprobs = np.full(max_slots, -1, np.int64)
        self._seed = np.zeros(max_slots, np.uint64)
        # Of few slots: those with penalties and those with a bias.
        self._penalties: dict[int, _Penalties] = {}
        self._bias: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}

    def begin_step(self, batch: StepBatch) -> NDArray[np.int32]:
        """Token ids of the step, [T] int32, none of them FROM_SLOT; FROM_EMBEDDINGS stays. Call once at the start of
        `forward`."""
        for init in batch.slot_inits:
            self._take_slot(init)
        unknown = np.flatnonzero(batch.input_ids == FROM_SLOT)
        if not len(unknown):
            return batch.input_ids
        rows = np.searchsorted(batch.query_starts, unknown, side="right") - 1
        input_ids = batch.input_ids.copy()
        input_ids[unknown] = self._last_tokens[batch.slots[rows]]
        return input_ids

    def sample(self, logits: NDArray[np.float32], batch: StepBatch, masks: TokenMasks | None = None) -> StepOutput:
        """See `IBatchedForwardPass.sample`."""
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
        for row, values in _masked_rows(logits, masks) if masks is not None else ():
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
        self._last_tokens[slots] = np.maximum(tokens, 0)
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            if slot in self._penalties and token >= 0:
                self._penalties[slot].count(token)
        reporting = np.flatnonzero((self._num_logprobs[slots] >= 0) & (tokens >= 0))
        if not len(reporting):
            return StepOutput(tokens)
        width = int(self._num_logprobs[slots[reporting]].max())
        return StepOutput(tokens, token_logprobs(raw_logits, tokens, reporting, width))

    def host_logits(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        return logits

    def _take_slot(self, init: SlotInit) -> None:
        slot, params = init.slot, init.sampling
        self._temperature[slot] = params.temperature
        self._top_p[slot] = params.top_p
        self._top_k[slot] = params.top_k
        self._min_p[slot] = params.min_p
        self._typical_p[slot] = params.typical_p
        self._num_logprobs[slot] = params.num_logprobs
        self._seed[slot] = params.seed
        self._bias.pop(slot, None)
        if params.logit_bias:
            ids = np.array([token_id for token_id, _ in params.logit_bias], np.int64)
            self._bias[slot] = ids, np.array([bias for _, bias in params.logit_bias], np.float32)
        self._penalties.pop(slot, None)
        if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
            self._penalties[slot] = _Penalties(params, init.token_ids, init.num_prompt_tokens, self._vocab_size)

    def _adjusted(self, logits: NDArray[np.float32], slots: NDArray[np.int32]) -> NDArray[np.float32]:
        """Logits with bias and penalties; a copy where any row has them."""
        penalised = [row for row, slot in enumerate(slots.tolist()) if slot in self._penalties]
        biased = [row for row, slot in enumerate(slots.tolist()) if slot in self._bias]
        if not penalised and not biased:
            return logits
        logits = logits.copy()
        if penalised:
            logits[penalised] = _penalise(logits[penalised], [self._penalties[int(slots[row])] for row in penalised])
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
        """One token for each row at temperature > 0. logits is a copy of ours, [n, V]; peaks its maxima, [n]."""
        scaled = logits
        scaled -= peaks[:, None]
        scaled /= np.maximum(self._temperature[slots], _MIN_TEMPERATURE)[:, None]
        floor = np.full(len(slots), -np.inf, np.float32)
        top_k = np.minimum(self._top_k[slots], self._vocab_size)
        limited = np.flatnonzero((top_k > 0) & (top_k < self._vocab_size))
        if len(limited):
            floor[limited] = _kth_largest(scaled[limited], top_k[limited])
        typical = np.flatnonzero(self._typical_p[slots] < 1.0)
        for row in typical.tolist():
            _keep_typical(scaled[row], floor[row], float(self._typical_p[slots[row]]))
        nucleus = np.flatnonzero(self._top_p[slots] < 1.0)
        if len(nucleus):
            floor[nucleus] = _nucleus_floor(scaled[nucleus], floor[nucleus], self._top_p[slots][nucleus])
        with np.errstate(divide="ignore"):
            floor = np.maximum(floor, np.log(self._min_p[slots]).astype(np.float32))
        if len(typical):
            # The peak that min_p goes by may have gone: the likeliest of what is left stays.
            floor[typical] = np.minimum(floor[typical], scaled[typical].max(axis=1))
        weights = np.exp(scaled, out=np.empty_like(scaled))
        weights[scaled < floor[:, None]] = 0.0
        return _inverse_cdf(weights, philox_uniform(self._seed[slots], positions))


class _Penalties:
    """What one slot's penalties need: which tokens were seen at all, and how often each was generated."""

    def __init__(
        self, params: SamplingParams, token_ids: NDArray[np.int32], num_prompt_tokens: int, vocab_size: int
    ) -> None:
        self.repetition = params.repetition_penalty
        self.presence = params.presence_penalty
        self.frequency = params.frequency_penalty
        self.generated = np.bincount(token_ids[num_prompt_tokens:], minlength=vocab_size).astype(np.int32)
        self.seen = np.zeros(vocab_size, np.bool_)
        self.seen[token_ids[token_ids != FROM_EMBEDDINGS]] = True

    def count(self, token: int) -> None:
        self.generated[token] += 1
        self.seen[token] = True


def _penalise(logits: NDArray[np.float32], penalties: list[_Penalties]) -> NDArray[np.float32]:
    """logits [n, V] with each row's penalties; repetition first, then frequency and presence."""
    seen = np.stack([p.seen for p in penalties])
    generated = np.stack([p.generated for p in penalties])
    repetition, frequency, presence = (
        np.array([values], np.float32).T
        for values in (
            [p.repetition for p in penalties],
            [p.frequency for p in penalties],
            [p.presence for p in penalties],
        )
    )
    logits = np.where(seen, np.where(logits > 0, logits / repetition, logits * repetition), logits)
    result: NDArray[np.float32] = logits - frequency * generated - presence * (generated > 0)
    return result.astype(np.float32, copy=False)


def _masked_rows(logits: NDArray[np.float32], masks: TokenMasks) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """The masked rows of logits [L, V] with their values, [V]: -inf where not allowed, but for what is no number.

    Values last until the next row is asked for: memory that stays in the cache, rather than a copy of all logits.
    """
    values = np.empty(logits.shape[1], np.float32)
    ceiling = np.empty((masks.bits.shape[1] * 4, 8), np.float32)
    for row, bits in zip(masks.rows.tolist(), masks.bits.view(np.uint8), strict=True):
        np.take(_CEILINGS, bits, axis=0, out=ceiling, mode="clip")
        yield row, np.minimum(logits[row], ceiling.reshape(-1)[: len(values)], out=values)


def token_logprobs(
    logits: NDArray[np.float32], tokens: NDArray[np.int32], rows: NDArray[np.int64], width: int
) -> TokenLogprobs:
    """For these rows of logits [L, V], whose sampled tokens are tokens [L]."""
    values = logits[rows].astype(np.float64)
    peaks = values.max(axis=1, keepdims=True)
    values -= peaks + np.log(np.exp(values - peaks).sum(axis=1, keepdims=True))
    chosen = np.take_along_axis(values, tokens[rows, None], axis=1)
    width = min(width, values.shape[1])
    # Stable, so that of equal values those of lower ids come first.
    candidates = np.sort(np.argpartition(-values, max(width - 1, 0), axis=1)[:, :width], axis=1)
    if width:
        # argpartition may leave out a lower id that ties with the last of the top.
        last = np.take_along_axis(values, candidates, axis=1).min(axis=1)
        for row in np.flatnonzero((values >= last[:, None]).sum(axis=1) > width).tolist():
            candidates[row] = np.argsort(-values[row], kind="stable")[:width]
    order = np.argsort(-np.take_along_axis(values, candidates, axis=1), axis=1, kind="stable")
    top_ids = np.take_along_axis(candidates, order, axis=1)
    return TokenLogprobs(
        rows=rows.astype(np.int32),
        chosen=chosen[:, 0].astype(np.float32),
        ranks=(values >= chosen).sum(axis=1).astype(np.int32),
        top_ids=top_ids.astype(np.int32),
        top=np.take_along_axis(values, top_ids, axis=1).astype(np.float32),
    )


def _keep_typical(scaled: NDArray[np.float32], floor: np.float32, typical_p: float) -> None:
    """One row, [V], in place: what is not locally typical becomes -inf.

    Kept are the tokens whose surprise is nearest to the distribution's entropy, until their mass reaches typical_p.
    """
    weights = np.where(scaled < floor, 0.0, np.exp(scaled.astype(np.float64)))
    mass = weights / weights.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = -np.log(mass)
        entropy = np.sum(np.where(mass > 0, mass * surprise, 0.0))
    order = np.argsort(np.where(mass > 0, np.abs(surprise - entropy), np.inf), kind="stable")
    num_kept = int(np.searchsorted(np.cumsum(mass[order]), typical_p)) + 1
    scaled[order[num_kept:]] = -np.inf


def _kth_largest(scaled: NDArray[np.float32], k: NDArray[np.int64]) -> NDArray[np.float32]:
    """The k-th largest value of each row, [n]; k is in [1, V]."""
    widest = int(k.max())
    largest = np.sort(np.partition(scaled, -widest, axis=1)[:, -widest:], axis=1)
    return np.asarray(largest[np.arange(len(k)), widest - k], dtype=np.float32)


def _nucleus_floor(
    scaled: NDArray[np.float32], floor: NDArray[np.float32], top_p: NDArray[np.float64]
) -> NDArray[np.float32]:
    """The smallest value of each row's nucleus, [n]: tokens in falling order until their mass reaches top_p (arXiv
    1904.09751), among those that floor [n] leaves. Sorts a guess of the largest first, all only where that falls short.
    """
    weights = np.exp(scaled)
    weights[scaled < floor[:, None]] = 0.0
    mass = weights.sum(axis=1, dtype=np.float64)
    result = np.empty(len(floor), np.float32)
    rows = np.arange(len(floor))
    for width in (min(_NUCLEUS_GUESS, scaled.shape[1]), scaled.shape[1]):
        values = np.sort(np.partition(scaled[rows], -width, axis=1)[:, -width:], axis=1)[:, ::-1]
        kept = np.where(values < floor[rows][:, None], 0.0, np.exp(values).astype(np.float64))
        reached = np.cumsum(kept, axis=1) >= (top_p[rows] * mass[rows])[:, None]
        found = reached[:, -1] if width < scaled.shape[1] else np.ones(len(rows), np.bool_)
        last = np.where(reached.any(axis=1), reached.argmax(axis=1), width - 1)
        result[rows[found]] = values[np.arange(len(rows)), last][found]
        rows = rows[~found]
        if not len(rows):
            break
    return np.maximum(result, floor)


def _inverse_cdf(weights: NDArray[np.float32], uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """For each row the first index at which the running sum of weights [n, V] exceeds uniform × the row's sum, [n].

    In two levels, so that only one block of each row is summed element by element.
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
    # Rounding may leave the target just above the block's own running sum: then its last token with any weight.
    above = inside > target[:, None]
    last_weighted = _CDF_BLOCK - 1 - np.argmax(blocks[rows, block][:, ::-1] > 0, axis=1)
    return np.asarray(block * _CDF_BLOCK + np.where(above.any(axis=1), above.argmax(axis=1), last_weighted))
