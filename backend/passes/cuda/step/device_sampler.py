"""Sampling on the device, without a wait for the host: the host sampler's rules with other random numbers.

A token is the argmax of logit / temperature + Gumbel noise over the tokens that pass the filters. The noise is
Philox4x32-10 of (the request's seed, the token's position, the token's id), so it does not depend on batch or slot.
Filter thresholds come from integer histograms (kernels/sampling/thresholds.cuh), so the blocks' order does not matter.
All tokens that tie with a filter's last token are kept, for typical_p too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.backend.forward_pass import FROM_EMBEDDINGS, SamplingParams, SlotInit
from penstock.backend.passes.cuda.device.launcher import ACT_MACRO, Argument, Kernel, Launcher

Ints = NDArray[np.int32]

MAX_VOCAB = 1 << 19
MAX_BIASES = 300
"""Most logit biases per slot; the limit of `Sampling`."""

_CHUNK = 4096
"""Logits that a block of the sampler loads at once."""
_MAX_CHUNKS = 8
"""Most chunks of a row for one block."""
_BLOCKS_TO_FILL_A_DEVICE = 1024
_NUM_THREADS = 256
_STATE_INTS = 16
_MAX_LISTED = 16_384
"""Most tokens of a row that filters choose from without reading all logits again."""
_MIN_TEMPERATURE = 1e-6
"""The same as in `penstock.backend.sampling.numpy_sampler`."""
_MAX_COUNT = (1 << 12) - 1
"""Cap of a token's count when a sequence takes its slot."""

_PARAMS = (
    ("inverse_temperature", "<f4"),
    ("top_k", "<i4"),
    ("top_p", "<f4"),
    ("typical_p", "<f4"),
    ("largest_gap", "<f4"),
    ("repetition", "<f4"),
    ("frequency", "<f4"),
    ("presence", "<f4"),
    ("seed", "<u8"),
    ("is_penalised", "<i4"),
    ("is_filtered", "<i4"),
    ("num_biases", "<i4"),
    ("padding", "<i4", 3),
)
"""SlotParams of kernels/sampling/sampling.cuh."""
_UPDATE = np.dtype([*_PARAMS, ("slot", "<i4"), ("first_bias", "<i4"), ("first_count", "<i4"), ("num_counts", "<i4")])
"""SlotUpdate of kernels/sampling/take_slots.cu."""
_PARAM_INTS = np.dtype([*_PARAMS]).itemsize // 4
_UPDATE_INTS = _UPDATE.itemsize // 4

_TAKE_SLOTS = Kernel("sampling/take_slots.cu", "take_slots", (("ACT", 0),), num_threads=256)


def kernels() -> Iterator[Kernel]:
    """Yield all instantiations; see `kernel_manifest`."""
    yield _TAKE_SLOTS
    for act in ACT_MACRO.values():
        yield from _SamplingKernels.of(act).all


@dataclass(frozen=True, slots=True)
class _SamplingKernels:
    scan_rows: Kernel
    list_tokens: Kernel
    filter_rows: Kernel
    log_probabilities: Kernel

    @classmethod
    def of(cls, act: int) -> _SamplingKernels:
        macros = (("ACT", act),)
        return cls(
            Kernel("sampling/sampling.cu", "scan_rows", macros, _NUM_THREADS),
            Kernel("sampling/sampling.cu", "list_tokens", macros, _NUM_THREADS),
            Kernel("sampling/filters.cu", "filter_rows", macros, _NUM_THREADS),
            Kernel("sampling/logprobs.cu", "log_probabilities", macros, num_threads=1024),
        )

    @property
    def all(self) -> tuple[Kernel, ...]:
        return self.scan_rows, self.list_tokens, self.filter_rows, self.log_probabilities


@dataclass(frozen=True, slots=True)
class SamplerFeatures:
    """Sampler features that the rows of a step use; kernels for other features are not launched."""

    is_redrawable: bool
    """No row has filters or penalties: drawing twice is drawing once."""
    is_filtered: bool
    """Whether some row has a filter."""
    logprob_rows: Ints
    """Rows that report log probabilities, [K] ascending."""
    num_likeliest: int
    """The largest num_logprobs of these rows."""
    named: Ints
    """[K × num_top] tokens that each of these rows names instead, -1 is padding; empty if none does."""
    num_top: int
    """The largest num_reported of these rows."""


_NO_INTS = np.empty(0, np.int32)
PLAIN = SamplerFeatures(True, False, _NO_INTS, 0, _NO_INTS, 0)


@dataclass(frozen=True, slots=True)
class LogprobBuffers:
    """Log probabilities of K rows, on the device."""

    chosen: Tensor
    """fp32 [K]"""
    ranks: Tensor
    """int32 [K]"""
    top_ids: Tensor
    """int32 [K, N], contiguous"""
    top: Tensor
    """fp32 [K, N], contiguous"""

    def cut(self, part: slice) -> LogprobBuffers:
        return LogprobBuffers(self.chosen[part], self.ranks[part], self.top_ids[part], self.top[part])


class SlotArrays:
    """Per-slot state on the device, and scratch memory for as many rows. Allocated once."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device, max_listed: int = _MAX_LISTED) -> None:
        """Raises ValueError if the vocabulary is too large."""
        if not 0 < vocab_size <= MAX_VOCAB:
            raise ValueError(f"vocab_size is {vocab_size}; the sampler supports 1 to {MAX_VOCAB}")
        self.vocab_size = vocab_size
        self.params = torch.zeros(max_slots, _PARAM_INTS, dtype=torch.int32, device=device)
        self.counts = torch.zeros(max_slots, _aligned(vocab_size), dtype=torch.int16, device=device)
        """Per token: times generated << 1 | whether it is in the prompt. Updated only for slots with penalties."""
        self.bias_tokens = torch.zeros(max_slots, MAX_BIASES, dtype=torch.int32, device=device)
        self.bias_values = torch.zeros(max_slots, MAX_BIASES, device=device)
        self.last_tokens = torch.zeros(max_slots, dtype=torch.int32, device=device)
        self.states = torch.zeros(max_slots, _STATE_INTS, dtype=torch.int32, device=device)
        self.group_peaks = torch.zeros(max_slots, _num_chunks(vocab_size) * _NUM_THREADS, device=device)
        """Per row: the largest logit of each thread's tokens."""
        self.lists = torch.zeros(max_slots, min(max_listed, vocab_size), 2, dtype=torch.int32, device=device)
        """Per row: logits and tokens that its filters may keep."""
        self.no_mask_rows = torch.full((max_slots,), -1, dtype=torch.int32, device=device)

    @staticmethod
    def num_bytes(max_slots: int, vocab_size: int) -> int:
        """Return the bytes of device memory."""
        ints = _PARAM_INTS + 2 * MAX_BIASES + _STATE_INTS + 2
        ints += _num_chunks(vocab_size) * _NUM_THREADS + 2 * min(_MAX_LISTED, vocab_size)
        return max_slots * (4 * ints + 2 * _aligned(vocab_size))


class DeviceSampler:
    """Samples the rows of a step, and records on the host which features each slot uses. Only the pass's thread uses
    it."""

    def __init__(
        self,
        launcher: Launcher,
        slots: SlotArrays,
        logits_dtype: torch.dtype,
        blocks_to_fill: int = _BLOCKS_TO_FILL_A_DEVICE,
    ) -> None:
        max_slots = len(slots.params)
        self._launcher = launcher
        self._slots = slots
        self._vocab_size = np.int32(slots.vocab_size)
        self._num_chunks = _num_chunks(slots.vocab_size)
        self._blocks_to_fill = blocks_to_fill
        self._kernels = _SamplingKernels.of(ACT_MACRO[logits_dtype])
        self._noted = np.zeros(max_slots, np.uint8)
        """Of each slot: 1 has filters, 2 has penalties, 4 reports log probabilities."""
        self._num_logprobs = np.full(max_slots, -1, np.int32)
        self._named: dict[int, tuple[int, ...]] = {}
        """logprob_token_ids of the slots that have some."""

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels to pass to `Launcher.prepare`."""
        return (_TAKE_SLOTS, *self._kernels.all)

    def pack(self, inits: Sequence[SlotInit]) -> Ints:
        """Pack new owners of slots as int32 [n]; copy the result to the device, 16-byte aligned, for `take_slots`.

        It has 20 ints per slot, 2 per bias, and with penalties 1 per distinct token of the sequence. Raises ValueError
        if a slot, a token or the number of biases is out of range.
        """
        updates = np.zeros(len(inits), _UPDATE)
        parts: list[Ints] = []
        start = len(inits) * _UPDATE_INTS
        # Biases first: these pairs must begin at even offsets.
        for update, init in zip(updates, inits, strict=True):
            self._note(update, init)
            biases = self._packed_biases(init.sampling)
            update["num_biases"], update["first_bias"] = len(biases), start
            parts.append(biases.ravel())
            start += biases.size
        for update, init in zip(updates, inits, strict=True):
            counts = self._packed_counts(init)
            update["num_counts"], update["first_count"] = len(counts), start
            parts.append(counts)
            start += len(counts)
        return np.concatenate([updates.view(np.int32), *parts])

    def features(self, slots: Ints) -> SamplerFeatures:
        """Return the features of a step whose logit rows have these slots, [L]."""
        noted = int(np.bitwise_or.reduce(self._noted[slots]))
        if not noted:
            return PLAIN
        num_logprobs = self._num_logprobs[slots]
        logprob_rows = np.flatnonzero(num_logprobs >= 0).astype(np.int32)
        num_likeliest = max(int(num_logprobs.max(initial=-1)), 0)
        named = [self._named.get(slot, ()) for slot in slots[logprob_rows].tolist()] if self._named else []
        num_top = max([num_likeliest, *map(len, named)])
        padded = [(*ids, *[-1] * (num_top - len(ids))) for ids in named] if any(named) else []
        return SamplerFeatures(
            not noted & 3,
            bool(noted & 1),
            logprob_rows,
            num_likeliest,
            np.array(padded, np.int32).ravel(),
            num_top,
        )

    def take_slots(self, updates: Tensor, num_slots: int) -> None:
        """Apply what `pack` made for num_slots slots. Call before the first step that samples them."""
        arrays = self._slots
        self._launcher.launch(
            _TAKE_SLOTS, (num_slots, 1, 1), updates, arrays.params, arrays.counts, arrays.bias_tokens,
            arrays.bias_values, self._vocab_size, np.int32(MAX_BIASES),
        )  # fmt: skip

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        context_lens: Tensor,
        features: SamplerFeatures,
        tokens: Tensor,
        masks: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Sample tokens int32 [L] from logits [L, vocab_size] with any row stride; NOT_FINITE if a row has no token.

        slots and context_lens: int32 [L]; context_lens excludes the token whose logits these are. Rows whose slot is -1
        are skipped. masks: int32 [L], -1 or a row of the second tensor, int32 [M, ceil(vocab_size / 32)], whose bit
        i % 32 of word i // 32 allows token i. Also records the tokens as their slots' last tokens, and counts them.

        Raises ValueError for more rows than slots, padding included.
        """
        if len(logits) > len(self._noted):
            raise ValueError(f"cannot sample {len(logits)} rows; there are {len(self._noted)} slots")
        arrays, launch, kernels = self._slots, self._launcher.launch, self._kernels
        mask_rows, bits = masks or (arrays.no_mask_rows, arrays.no_mask_rows)
        step: tuple[Argument, ...] = (
            logits, np.int64(logits.stride(0)), self._vocab_size, slots, context_lens, mask_rows, bits, arrays.params,
            arrays.counts, arrays.bias_tokens, arrays.bias_values, np.int32(MAX_BIASES), arrays.last_tokens,
            arrays.states, arrays.group_peaks, arrays.lists, np.int32(arrays.lists.shape[1]), tokens,
        )  # fmt: skip
        grid = (self._blocks_of_row(len(logits)), len(logits), 1)
        launch(kernels.scan_rows, grid, *step)
        if features.is_filtered:
            launch(kernels.list_tokens, grid, *step)
            launch(kernels.filter_rows, (1, len(logits), 1), *step)

    def logprobs(
        self, logits: Tensor, tokens: Tensor, rows: Tensor, out: LogprobBuffers, named: Tensor, num_likeliest: int
    ) -> None:
        """Compute the log probabilities of rows int32 [K] of logits [L, vocab_size] and of the sampled tokens.

        They are fp32, of the raw logits. named and num_likeliest: see `SamplerFeatures`. A row of -1 is padding. A row
        without a token gets NaN, rank 0 and ids of -1, as unused columns do.
        """
        self._launcher.launch(
            self._kernels.log_probabilities, (len(rows), 1, 1), logits, np.int64(logits.stride(0)), self._vocab_size,
            tokens, rows, out.chosen, out.ranks, out.top_ids, out.top, np.int32(out.top_ids.shape[1]),
            named, np.int32(len(named) > 0), np.int32(num_likeliest),
        )  # fmt: skip

    def _blocks_of_row(self, num_rows: int) -> int:
        """Return enough blocks to fill a device; fewer have less to do for each chunk. No result depends on it."""
        fewest = -(-self._num_chunks // _MAX_CHUNKS)
        return min(self._num_chunks, max(fewest, -(-self._blocks_to_fill // max(num_rows, 1))))

    def _note(self, update: np.void, init: SlotInit) -> None:
        slot, params = init.slot, init.sampling
        if not 0 <= slot < len(self._noted):
            raise ValueError(f"slot is {slot}; there are {len(self._noted)}")
        update["slot"] = slot
        update["inverse_temperature"] = 1 / max(params.temperature, _MIN_TEMPERATURE) if params.temperature else 0.0
        update["top_k"] = params.top_k if params.top_k < self._vocab_size else 0
        update["top_p"], update["typical_p"] = params.top_p, params.typical_p
        gap = -np.log(params.min_p) * max(params.temperature, _MIN_TEMPERATURE) if params.min_p else np.inf
        update["largest_gap"] = gap
        update["repetition"] = params.repetition_penalty
        update["frequency"], update["presence"] = params.frequency_penalty, params.presence_penalty
        update["seed"] = params.seed
        update["is_penalised"] = _is_penalised(params)
        has_filter = update["top_k"] > 0 or update["typical_p"] < 1 or update["top_p"] < 1 or params.min_p > 0
        update["is_filtered"] = is_filtered = params.temperature > 0 and has_filter
        noted = (is_filtered, update["is_penalised"], params.num_logprobs >= 0)
        self._noted[slot] = sum(int(is_used) << bit for bit, is_used in enumerate(noted))
        self._num_logprobs[slot] = min(params.num_logprobs, int(self._vocab_size))
        self._named.pop(slot, None)
        if ids := params.logprob_token_ids:
            self._check_tokens(min(ids), max(ids))
            self._named[slot] = ids

    def _packed_biases(self, params: SamplingParams) -> Ints:
        """Return [n, 2] tokens and the bits of their biases; several biases of one token are added."""
        if len(params.logit_bias) > MAX_BIASES:
            raise ValueError(f"a slot has {len(params.logit_bias)} biases; at most {MAX_BIASES} are allowed")
        summed: dict[int, float] = {}
        for token, bias in params.logit_bias:
            self._check_tokens(token, token)
            summed[token] = summed.get(token, 0.0) + bias
        packed = np.empty((len(summed), 2), np.int32)
        packed[:, 0] = list(summed)
        packed[:, 1] = np.array(list(summed.values()), np.float32).view(np.int32)
        return packed

    def _packed_counts(self, init: SlotInit) -> Ints:
        prompt, generated = np.split(init.token_ids, [init.num_prompt_tokens])
        prompt = prompt[prompt != FROM_EMBEDDINGS]
        if not _is_penalised(init.sampling) or not len(prompt) + len(generated):
            return np.empty(0, np.int32)
        known = np.concatenate([prompt, generated])
        self._check_tokens(int(known.min()), int(known.max()))
        words = np.minimum(np.bincount(generated, minlength=int(self._vocab_size)), _MAX_COUNT).astype(np.uint32) << 1
        words[prompt] |= 1
        tokens = np.flatnonzero(words)
        return (tokens.astype(np.uint32) << 13 | words[tokens]).view(np.int32)

    def _check_tokens(self, lowest: int, highest: int) -> None:
        if lowest < 0 or highest >= self._vocab_size:
            raise ValueError(f"token ids are {lowest} … {highest}; the vocabulary has {self._vocab_size}")


def _is_penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty)


def _num_chunks(vocab_size: int) -> int:
    return -(-vocab_size // _CHUNK)


def _aligned(vocab_size: int) -> int:
    """Round up to 16 bytes of counts."""
    return -(-vocab_size // 8) * 8
