"""The sampler of the CPU kernels: kernels/rows/sampling.h."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, Structure, addressof, byref, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.backend.forward_pass import (
    FROM_EMBEDDINGS,
    NOT_FINITE,
    SamplingParams,
    SlotInit,
    TokenLogprobs,
    TokenMasks,
)
from penstock.backend.sampling.logprobs import with_named_tokens
from penstock.backend.sampling.repetition import Repetitions

_SPARE_TOKENS = 256
"""Room for sampled tokens that a sequence does not contain yet."""


class DrySettings(Structure):
    _fields_ = (
        ("tokens", c_void_p),
        ("heads_mask", c_void_p),
        ("heads", c_void_p),
        ("tails", c_void_p),
        ("tail_tokens", c_void_p),
        ("num_breakers", c_int64),
        ("window", c_int64),
        ("allowed_length", c_int64),
        ("multiplier", c_double),
        ("base", c_double),
    )


class SampledSlot(Structure):
    _fields_ = (
        ("top_p", c_double),
        ("typical_p", c_double),
        ("min_p", c_double),
        ("seed", c_uint64),
        ("top_k", c_int64),
        ("num_logprobs", c_int64),
        ("bias_ids", c_void_p),
        ("biases", c_void_p),
        ("num_biases", c_int64),
        ("seen_ids", c_void_p),
        ("generated", c_void_p),
        ("num_seen", c_int64),
        ("has_penalties", c_int64),
        ("dry", c_void_p),
        ("xtc_probability", c_double),
        ("xtc_threshold", c_double),
        ("top_n_sigma", c_double),
        ("dynatemp_range", c_double),
        ("dynatemp_exponent", c_double),
        ("temperature", c_float),
        ("repetition", c_float),
        ("frequency", c_float),
        ("presence", c_float),
    )


class SampledRows(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("slots", c_void_p),
        ("slot_of_row", c_void_p),
        ("positions", c_void_p),
        ("masks", c_void_p),
        ("mask_of_row", c_void_p),
        ("mask_words", c_int64),
        ("num_rows", c_int64),
        ("vocab", c_int64),
        ("num_top", c_int64),
        ("tokens", c_void_p),
        ("chosen", c_void_p),
        ("ranks", c_void_p),
        ("top_ids", c_void_p),
        ("top", c_void_p),
    )


class PreparedRows(NamedTuple):
    rows: SampledRows
    tokens: NDArray[np.int32]
    memory: tuple[object, ...]
    """Arrays that rows points to; the logits and the tokens are kept elsewhere."""


class _SeenTokens:
    """The tokens of a sequence, each once, and how often each was generated. The kernels add to them."""

    def __init__(self, init: SlotInit) -> None:
        generated = init.token_ids[init.num_prompt_tokens :]
        self.ids, places = np.unique(init.token_ids[init.token_ids != FROM_EMBEDDINGS], return_inverse=True)
        self.num_ids = len(self.ids)
        self.generated = np.bincount(places[len(places) - len(generated) :], minlength=self.num_ids).astype(np.int32)
        self.grow()

    def grow(self) -> None:
        room = self.num_ids + _SPARE_TOKENS
        self.ids, self.generated = (
            np.concatenate([values, np.zeros(room, np.int32)]) for values in (self.ids, self.generated)
        )


class NativeSampler:
    """Implements `IRowSampler`. engine must be open while rows are sampled; its threads divide the rows."""

    def __init__(self, library: CDLL, engine: int, vocab_size: int, max_slots: int) -> None:
        self._library, self._engine, self._vocab_size = library, engine, vocab_size
        self._slots = (SampledSlot * max_slots)()
        self._biases: dict[int, tuple[NDArray[np.int32], NDArray[np.float32]]] = {}
        self._seen: dict[int, _SeenTokens] = {}
        self._dry: dict[int, tuple[DrySettings, Repetitions]] = {}
        self._named: dict[int, tuple[int, ...]] = {}
        self._attended = set[int]()
        """Slots that `prepare_queued` refuses."""

    def take_slot(self, init: SlotInit) -> None:
        index, params = init.slot, init.sampling
        for kept in (self._biases, self._seen, self._dry, self._named):
            kept.pop(index, None)
        self._slots[index] = SampledSlot(
            top_p=params.top_p,
            typical_p=params.typical_p,
            min_p=params.min_p,
            seed=params.seed,
            top_k=params.top_k,
            num_logprobs=params.num_logprobs,
            xtc_probability=params.xtc_probability,
            xtc_threshold=params.xtc_threshold,
            top_n_sigma=params.top_n_sigma,
            dynatemp_range=params.dynatemp_range,
            dynatemp_exponent=params.dynatemp_exponent,
            temperature=params.temperature,
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
        )
        slot = self._slots[index]  # a view
        self._attended.discard(index)
        if params.has_penalties or params.dry_multiplier or params.num_logprobs >= 0:
            self._attended.add(index)
        if params.logprob_token_ids:
            self._named[index] = params.logprob_token_ids
        if params.logit_bias:
            ids, biases = zip(*params.logit_bias, strict=True)
            arrays = self._biases[index] = np.array(ids, np.int32), np.array(biases, np.float32)
            slot.bias_ids, slot.biases = (array.ctypes.data for array in arrays)
            slot.num_biases = len(ids)
        if params.has_penalties:
            self._seen[index] = _SeenTokens(init)
            slot.has_penalties = 1
            self._point_to_seen(index)
        if params.dry_multiplier:
            repetitions = Repetitions(params, init.token_ids, self._vocab_size)
            settings = _dry_settings(params, repetitions)
            self._dry[index], slot.dry = (settings, repetitions), addressof(settings)

    def sample(
        self,
        logits: NDArray[np.float32],
        slots: Sequence[int],
        positions: Sequence[int],
        masks: TokenMasks | None,
    ) -> tuple[NDArray[np.int32], TokenLogprobs | None]:
        for index, position in zip(slots, positions, strict=True) if self._dry else ():
            settings, repetitions = self._dry.get(index, (None, None))
            if settings is not None and repetitions is not None and repetitions.make_room(position):
                settings.tokens = repetitions.tokens.ctypes.data
        count, logits = len(slots), np.ascontiguousarray(logits, np.float32)
        prepared = self._rows(logits, slots, positions)
        rows, tokens = prepared.rows, prepared.tokens
        if masks is not None:
            mask_of_row = (c_int64 * count)(*[-1] * count)
            for place, row in enumerate(masks.rows.tolist()):
                mask_of_row[row] = place
            bits = np.ascontiguousarray(masks.bits)
            rows.masks, rows.mask_words, rows.mask_of_row = bits.ctypes.data, bits.shape[1], addressof(mask_of_row)
        reporting = [row for row, slot in enumerate(slots) if self._slots[slot].num_logprobs >= 0]
        if not reporting:
            self._library.ps_sample(self._engine, byref(rows))
            self._make_room(slots)
            return tokens, None
        width = min(max(self._slots[slots[row]].num_logprobs for row in reporting), self._vocab_size)
        chosen, ranks = np.empty(count, np.float32), np.empty(count, np.int32)
        top_ids, top = np.empty((count, width), np.int32), np.empty((count, width), np.float32)
        rows.num_top, rows.chosen, rows.ranks = width, chosen.ctypes.data, ranks.ctypes.data
        rows.top_ids, rows.top = top_ids.ctypes.data, top.ctypes.data
        self._library.ps_sample(self._engine, byref(rows))
        self._make_room(slots)
        kept = np.array([row for row in reporting if tokens[row] >= 0], np.int32)
        if not len(kept):
            return tokens, None
        found = TokenLogprobs(kept, chosen[kept], ranks[kept], top_ids[kept], top[kept])
        named = [self._named.get(slots[row], ()) for row in kept.tolist()]
        return tokens, with_named_tokens(found, logits, tokens, named) if any(named) else found

    def _rows(self, logits: NDArray[np.float32], slots: Sequence[int], positions: Sequence[int]) -> PreparedRows:
        count = len(slots)
        tokens = np.full(count, NOT_FINITE, np.int32)
        slot_of_row, position_of_row = (c_int32 * count)(*slots), (c_int64 * count)(*positions)
        rows = SampledRows(
            logits=logits.ctypes.data,
            slots=addressof(self._slots),
            slot_of_row=addressof(slot_of_row),
            positions=addressof(position_of_row),
            num_rows=count,
            vocab=self._vocab_size,
            tokens=tokens.ctypes.data,
        )
        return PreparedRows(rows, tokens, (slot_of_row, position_of_row))

    def prepare_queued(
        self, logits: NDArray[np.float32], slots: Sequence[int], positions: Sequence[int]
    ) -> PreparedRows | None:
        """None if a slot has arrays that may have to grow, or reports log probabilities."""
        return self._rows(logits, slots, positions) if self._attended.isdisjoint(slots) else None

    def _make_room(self, slots: Sequence[int]) -> None:
        if not self._seen:
            return
        for index in slots:
            seen = self._seen.get(index)
            if seen is None:
                continue
            seen.num_ids = self._slots[index].num_seen
            if seen.num_ids == len(seen.ids):
                seen.grow()
                self._point_to_seen(index)

    def _point_to_seen(self, index: int) -> None:
        seen, slot = self._seen[index], self._slots[index]
        slot.seen_ids, slot.generated, slot.num_seen = seen.ids.ctypes.data, seen.generated.ctypes.data, seen.num_ids


def _dry_settings(params: SamplingParams, repetitions: Repetitions) -> DrySettings:
    """It points into the arrays of repetitions."""
    breakers = repetitions.breakers
    return DrySettings(
        tokens=repetitions.tokens.ctypes.data,
        heads_mask=breakers.heads_mask.ctypes.data,
        heads=breakers.heads.ctypes.data,
        tails=breakers.tail_starts.ctypes.data,
        tail_tokens=breakers.tail_tokens.ctypes.data,
        num_breakers=len(breakers.heads),
        window=repetitions.window,
        allowed_length=params.dry_allowed_length,
        multiplier=params.dry_multiplier,
        base=params.dry_base,
    )
