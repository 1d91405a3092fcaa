"""Packs a step in one call of kernels/step/pack_step.cpp, whose structs are here."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL, Structure, byref, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from penstock.backend.forward_pass import StepBatch
from penstock.backend.passes.ops.prompt_embeddings import check_embeddings

Ints = NDArray[np.int32]

NO_INTS = np.empty(0, np.int32)
MAX_PARTS = 16
_INT32 = np.dtype(np.int32)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of a step, fixed when the cache is created."""

    max_rows: int
    max_tokens: int
    max_pages: int
    """Most pages of one sequence."""
    page_size_tokens: int
    num_pages: int
    vocab_size: int
    tail_ints: int
    """Most ints that the caller may send along with a step."""
    num_groups: int = 1
    """Groups of layers that have pages of their own."""
    mixed_tokens: int = 0
    """Tokens of the largest captured mixed step, at most max_tokens; 0 for none."""
    mixed_tiles: int = 0
    """Tiles of such a step."""
    has_adapters: bool = False
    """Rows may have adapters."""
    has_axes: bool = False
    """Steps have `StepBatch.rope_positions`, also of text."""
    max_verified: int = 0
    """Most rows and drafts of a step with drafts; 0 if there are none."""

    @property
    def token_ints(self) -> int:
        """Ints that are sent for each token."""
        return 1 + 3 * self.has_axes

    @property
    def max_logits(self) -> int:
        return max(self.max_rows, self.max_verified)


@dataclass(frozen=True, slots=True)
class MixedPadding:
    """A captured step in which some rows have several tokens, or no logits, and its padding."""

    num_tokens: int
    num_tiles: int
    num_decode: int
    """Rows of one token in the step itself."""
    tiles: Ints
    """[at most num_tiles, 4] of the step itself."""


_POINTERS = (
    *("input_ids", "query_starts", "context_lens", "page_table", "slots", "logit_rows", "own_tiles"),
    *("adapters", "drafts", "positions", "block", "pages"),
)
_NUMBERS = (
    *("num_tokens", "num_rows", "num_starts", "num_logits", "table_width", "padded_tokens", "is_mixed", "num_decode"),
    *("num_own_tiles", "num_tiles", "has_embeddings", "is_drawn", "num_parts"),
)


_NUM_ARRAYS = len(_POINTERS) - 2
"""Those of the batch."""


class _Step(Structure):
    _fields_ = (
        ("pointers", c_int64 * len(_POINTERS)),
        ("numbers", c_int64 * len(_NUMBERS)),
        ("parts", c_int64 * MAX_PARTS),
        ("part_sizes", c_int64 * MAX_PARTS),
        ("part_starts", c_int64 * MAX_PARTS),
        ("changes_start", c_int64),
        ("num_changes", c_int64),
        ("num_ints", c_int64),
    )


class _Fault(IntEnum):
    NONE, TOO_MANY, STARTS, SLOTS, TOKENS, EMBEDDINGS, LOGIT_ROWS, DRAFTS, ENDS, PAGES, CAPACITY = range(11)


class StepPacker:
    """Knows the pages that the device has."""

    def __init__(self, library: CDLL, limits: StepLimits, places: dict[str, slice], most: tuple[int, int]) -> None:
        """library is that of `STEP_BUILD`. places: of the arrays in the block. most: page changes in one copy, and ints
        of the block."""
        self._limits, self._most = limits, most
        self._pack = library.ps_pack_step
        self._pack.restype, self._pack.argtypes = c_int64, (c_void_p, c_void_p)
        sizes = [limits.max_rows, limits.max_tokens, limits.max_pages, limits.page_size_tokens, limits.num_pages]
        sizes += [limits.vocab_size, limits.num_groups, limits.max_logits, *most]
        starts = [place.start for place in places.values()]
        numbers = *sizes, *starts, limits.has_adapters * limits.max_tokens, int(limits.has_axes)
        self._layout = (c_int64 * len(numbers))(*numbers)
        self.pages = np.full((limits.num_groups, limits.max_rows, limits.max_pages), -1, np.int32)
        """Contents of the device's page tables."""
        self._pages_address = self.pages.ctypes.data
        self._step = step = _Step()
        # The struct's arrays share its memory; naming them each time would make objects.
        self._pointers, self._numbers, self._parts, self._sizes = (
            step.pointers, step.numbers, step.parts, step.part_sizes
        )  # fmt: skip
        self._arguments = byref(self._layout), byref(step)

    def pack(
        self, batch: StepBatch, block: int, padded: int, mixed: MixedPadding | None, parts: Sequence[Ints],
        *, is_drawn: bool,
    ) -> _Step:  # fmt: skip
        """Write the step, padded to `padded` rows of one token or as `mixed`, to host memory at the address `block`.

        Its page changes count as sent. Raises ValueError for an invalid batch, and then changes nothing.
        """
        if batch.embeddings:
            check_embeddings(batch)
        table, ids = batch.page_table, batch.input_ids
        tiles, num_tiles, num_decode = NO_INTS, 0, 0
        if mixed is not None:
            tiles, num_tiles, num_decode, padded = mixed.tiles, mixed.num_tiles, mixed.num_decode, mixed.num_tokens
        arrays: list[Ints | None] = [
            ids, batch.query_starts, batch.context_lens, table, batch.slots, batch.logit_rows, tiles, batch.adapters,
            batch.drafts, batch.rope_positions, *parts,
        ]  # fmt: skip
        for index, array in enumerate(arrays):
            if array is not None and (array.dtype != _INT32 or not array.flags.c_contiguous):
                arrays[index] = np.ascontiguousarray(array, np.int32)
        # ndarray.ctypes would make two objects of each array.
        addresses = [0 if array is None else array.__array_interface__["data"][0] for array in arrays]
        self._pointers[:] = (*addresses[:_NUM_ARRAYS], block, self._pages_address)
        num_tokens: int = ids.shape[0]
        self._numbers[:] = (
            num_tokens, batch.context_lens.shape[0], batch.query_starts.shape[0], batch.logit_rows.shape[0],
            table.shape[1], padded if padded > num_tokens else num_tokens, mixed is not None, num_decode,
            tiles.shape[0], num_tiles, batch.embeddings != (), is_drawn, len(parts),
        )  # fmt: skip
        self._parts[: len(parts)] = addresses[_NUM_ARRAYS:]
        self._sizes[: len(parts)] = [part.size for part in parts]
        fault = self._pack(*self._arguments)
        if fault:
            self._refuse(_Fault(fault), batch)
        return self._step

    def _refuse(self, fault: _Fault, batch: StepBatch) -> None:
        limits, starts, ids = self._limits, batch.query_starts, batch.input_ids
        if fault == _Fault.EMBEDDINGS:
            check_embeddings(batch)
        if fault == _Fault.CAPACITY:
            raise ValueError(f"cannot send {self._step.num_ints} ints; the block holds {self._most[1]}")
        capacity_tokens = min(batch.page_table.shape[1], limits.max_pages) * limits.page_size_tokens
        texts = {
            _Fault.TOO_MANY: f"the step has {batch.num_tokens} tokens in {batch.num_rows} rows; "
            f"at most {limits.max_tokens} in {limits.max_rows} are allowed",
            _Fault.STARTS: f"query_starts are {starts.tolist()}, for {batch.num_rows} rows and {len(ids)} tokens",
            _Fault.SLOTS: f"slots are {_range(batch.slots)}; there are {limits.max_rows}",
            _Fault.TOKENS: f"token ids are {_range(ids)}; the vocabulary has {limits.vocab_size}",
            _Fault.LOGIT_ROWS: f"logit rows are {_range(batch.logit_rows)}; there are {batch.num_rows}",
        }
        if fault == _Fault.DRAFTS:
            if batch.num_sampled > limits.max_logits:
                raise ValueError(f"{batch.num_sampled} rows and drafts are sampled; at most {limits.max_logits} may be")
            first = ids[batch.verified_tokens + 1].min(initial=0)
            raise ValueError(f"a draft is {first}; it must be a token, behind one of its row")
        if fault in texts:
            raise ValueError(texts[fault])
        ends = batch.context_lens + np.diff(starts)
        if fault == _Fault.ENDS:
            raise ValueError(f"a row ends at {ends.max()} tokens; its pages hold {capacity_tokens}")
        own = np.arange(batch.page_table.shape[1]) < -(-ends // limits.page_size_tokens)[:, None]
        raise ValueError(f"pages are {_range(batch.page_table[own])}; there are {limits.num_pages}")


def _range(values: Ints) -> str:
    return f"{values.min()} … {values.max()}" if values.size else "none"
