"""The device's copy of a step, at fixed addresses. It arrives in one copy per step.

The host writes a step into one of two pinned blocks in turn, and one copy sends the used part to the device's block.
The block begins with arrays at fixed addresses, which captured graphs read; a mixed step's tiles are the last of them.
After these come the parts that only kernels launched with the step read. Page tables stay on the device; only their
changes are sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.backend.forward_pass import FROM_EMBEDDINGS, StepBatch
from penstock.backend.passes.cuda.device.device import Device
from penstock.backend.passes.cuda.device.launcher import Kernel
from penstock.backend.passes.cuda.device.transfers import Uplink, aligned
from penstock.backend.passes.cuda.step.step_rows import CudaStep, RowArrays
from penstock.backend.passes.ops.layer_groups import check_groups
from penstock.backend.passes.ops.prompt_embeddings import check_embeddings

Ints = NDArray[np.int32]

_CHANGES_AT_ONCE = 1 << 13
"""Most changed page table entries in one copy."""
_CHANGE_PAGES = Kernel("step/step.cu", "change_pages", (), num_threads=128)


def kernels() -> Iterator[Kernel]:
    """Yield all instantiations; see `kernel_manifest`."""
    yield _CHANGE_PAGES


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
    max_verified: int = 0
    """Most rows and drafts of a step with drafts; 0 if there are none."""


@dataclass(frozen=True, slots=True)
class MixedPadding:
    """A captured step in which some rows have several tokens, or no logits, and its padding."""

    num_tokens: int
    num_tiles: int
    num_decode: int
    """Rows of one token in the step itself."""
    tiles: Ints
    """[at most num_tiles, 4] of the step itself."""


_BEYOND_ALL_TOKENS = 1 << 30
"""Start of a padding row without tokens."""
_UNUSED_TILE = (0, -1, 0)
"""Beside the row."""


class StepBuffers:
    """Owns the device's step block and page table, and their host copies. Only the pass's thread uses it."""

    def __init__(self, device: Device, limits: StepLimits) -> None:
        self._device = device
        self._limits = limits
        rows = limits.max_rows
        self._places = _places(limits)
        ids, tiles = self._places["ids"], self._places["tiles"]
        self._fixed = np.zeros(max(ids.stop, tiles.stop), np.int32)
        self._pages = np.full((limits.num_groups, rows, limits.max_pages), -1, np.int32)
        """Contents of the device's page tables."""

        self.uplink = Uplink(device, self.num_bytes(limits) // 4 - self._pages.size)
        self.page_tables = torch.zeros(self._pages.shape, dtype=torch.int32, device=device.torch_device)
        """int32 [groups, max_rows, max_pages], by slot."""
        self.input_ids = self._view("ids")
        self.tiles = self._view("tiles")
        """The tiles of a mixed step, flat: its own and unused ones."""
        names = ("query_starts", "context_lens", "slots")
        self.rows = RowArrays(*map(self._view, names))
        """Views of all rows that a step can have, and one more, which is padding in every mixed step."""
        decode_slots = self._view("decode_slots")
        self.decode_rows = RowArrays(self.rows.query_starts, self.rows.context_lens, decode_slots)
        """See `CudaStep.decode_rows`; for a mixed step only."""
        self.logit_rows = RowArrays(*(self._view(f"logit_{name}") for name in names))
        """The last tokens of the rows that need logits, and the tokens before drafts, as rows of one token each."""
        self.logit_tokens = self._view("logit_tokens")
        """Index of each of those tokens in the step."""
        for arrays in (self.rows, self.logit_rows):  # all rows are padding until the first step
            arrays.slots.fill_(-1)
            torch.arange(len(arrays.query_starts), dtype=torch.int32, out=arrays.query_starts)
        decode_slots.fill_(-1)

    @staticmethod
    def num_bytes(limits: StepLimits) -> int:
        """Return the bytes of device memory."""
        places = _places(limits)
        fixed = aligned(max(places["ids"].stop, places["tiles"].stop))
        tail = aligned(limits.tail_ints) + aligned(3 * _CHANGES_AT_ONCE)
        return 4 * (fixed + tail + limits.num_groups * limits.max_rows * limits.max_pages)

    def load(
        self, batch: StepBatch, num_padded_rows: int, parts: list[Ints], mixed: MixedPadding | None = None
    ) -> list[Tensor]:
        """Send the step, padded to num_padded_rows rows or as `mixed`, and its page table changes to the device.

        parts, at most tail_ints in total, are sent along; returns them on the device, each int32 [n]. The token ids
        FROM_SLOT and FROM_EMBEDDINGS are sent unchanged. Raises ValueError for an invalid batch.
        """
        changes = self._page_changes(batch, self._check(batch))
        try:
            used = self._write_mixed(batch, mixed) if mixed is not None else self._write(batch, num_padded_rows)
            return self._send(used, changes, parts)
        except Exception:
            self._pages[:, batch.slots] = -1  # unknown: some of the changes may have arrived
            raise

    def step(self, batch: StepBatch, num_decode: int, tiles: Tensor | None) -> CudaStep:
        """Return a step that `load` has sent without padding, whose first num_decode rows have one token.

        tiles: `CudaStep.prefill_tiles`.
        """
        num_logits = batch.num_sampled
        return CudaStep(
            num_tokens=batch.num_tokens,
            rows=self.rows.cut(batch.num_rows),
            decode_rows=self.rows.cut(num_decode),
            prefill_tiles=tiles,
            logit_rows=self.logit_rows.cut(num_logits),
            logit_tokens=self.logit_tokens[:num_logits],
            is_decode_only=num_decode == num_logits == batch.num_rows,
            is_scored=batch.scored is not None,
        )

    def decode_step(self, num_rows: int) -> CudaStep:
        """Return a step of num_rows decodes, at the addresses that a graph reads."""
        rows, logit_rows = self.rows.cut(num_rows), self.logit_rows.cut(num_rows)
        return CudaStep(num_rows, rows, rows, None, logit_rows, self.logit_tokens[:num_rows], True)

    def mixed_step(self, num_tokens: int, num_tiles: int) -> CudaStep:
        """Like `decode_step`, for a mixed step without its logits."""
        return CudaStep(
            num_tokens=num_tokens,
            rows=self.rows,
            decode_rows=self.decode_rows,
            prefill_tiles=self.tiles[: 4 * num_tiles],
            logit_rows=self.logit_rows.cut(0),
            logit_tokens=self.logit_tokens[:0],
            is_decode_only=False,
        )

    def _send(self, used: Ints, changes: Ints, parts: list[Ints]) -> list[Tensor]:
        while len(changes) > _CHANGES_AT_ONCE:
            # Only a step with very many new pages gets here. The excess goes ahead of the step, in separate copies.
            self._apply(*self.uplink.send([changes[:_CHANGES_AT_ONCE]]))
            changes = changes[_CHANGES_AT_ONCE:]
        _, sent, *rest = self.uplink.send([used, changes, *parts])
        self._apply(sent)
        return rest

    def _view(self, name: str) -> Tensor:
        return self.uplink.block[self._places[name]]

    def _check(self, batch: StepBatch) -> Ints:
        """Return each row's end, [R], in tokens of its sequence. Raises ValueError for an invalid batch."""
        limits, starts = self._limits, batch.query_starts
        if batch.num_tokens > limits.max_tokens or batch.num_rows > limits.max_rows:
            raise ValueError(
                f"the step has {batch.num_tokens} tokens in {batch.num_rows} rows; "
                f"at most {limits.max_tokens} in {limits.max_rows} are allowed"
            )
        lengths = np.diff(starts)
        if len(lengths) != batch.num_rows or starts[0] != 0 or starts[-1] != batch.num_tokens or lengths.min() < 1:
            raise ValueError(
                f"query_starts are {starts.tolist()}, for {batch.num_rows} rows and {batch.num_tokens} tokens"
            )
        if batch.slots.min() < 0 or batch.slots.max() >= limits.max_rows:
            raise ValueError(f"slots are {batch.slots.min()} … {batch.slots.max()}; there are {limits.max_rows}")
        if batch.input_ids.min() < FROM_EMBEDDINGS or batch.input_ids.max() >= limits.vocab_size:
            raise ValueError(
                f"token ids are {batch.input_ids.min()} … {batch.input_ids.max()}; the vocabulary has "
                f"{limits.vocab_size}"
            )
        check_embeddings(batch)
        check_groups(batch, limits.num_groups)
        if len(rows := batch.logit_rows) and (rows[0] < 0 or rows[-1] >= batch.num_rows):
            raise ValueError(f"logit rows are {rows[0]} … {rows[-1]}; there are {batch.num_rows}")
        if batch.drafts is not None:
            if batch.num_sampled > limits.max_verified:
                raise ValueError(
                    f"{batch.num_sampled} rows and drafts are sampled; at most {limits.max_verified} may be"
                )
            if (first := batch.input_ids[batch.verified_tokens + 1].min(initial=0)) < 0:
                raise ValueError(f"a draft is {first}; it must be a token")
        ends: Ints = batch.context_lens + lengths
        capacity_tokens = min(batch.page_table.shape[1], limits.max_pages) * limits.page_size_tokens
        if ends.max() > capacity_tokens or batch.context_lens.min() < 0:
            raise ValueError(f"a row ends at {ends.max()} tokens; its pages hold {capacity_tokens}")
        return ends

    def _page_changes(self, batch: StepBatch, ends: Ints) -> Ints:
        """Return [n, 3] where the batch's pages differ from the device's: slot, counted through the tables of all
        groups, index and page. Record them as sent."""
        limits = self._limits
        num_pages = -(-ends // limits.page_size_tokens)
        width = int(num_pages.max())
        needed = batch.page_table[None, :, :width]
        if batch.page_table.ndim == 3:
            needed = np.moveaxis(batch.page_table[:, :width], 2, 0)
        differs = (needed != self._pages[:, batch.slots, :width]) & (np.arange(width) < num_pages[:, None])
        groups, rows, indices = np.nonzero(differs)
        changes = np.empty((len(rows), 3), np.int32)
        if not len(rows):
            return changes
        pages, slots = needed[groups, rows, indices], batch.slots[rows]
        if pages.min() < 0 or pages.max() >= limits.num_pages:
            raise ValueError(f"pages are {pages.min()} … {pages.max()}; there are {limits.num_pages}")
        self._pages[groups, slots, indices] = pages
        changes[:, 0], changes[:, 1], changes[:, 2] = groups * limits.max_rows + slots, indices, pages
        return changes

    def _write(self, batch: StepBatch, num_padded_rows: int) -> Ints:
        """Write the step and rows of one token as padding. Return the part of the block to send."""
        fixed, places = self._fixed, self._places
        num_rows = batch.num_rows
        self._write_rows(batch)
        num_ids = max(batch.num_tokens, num_padded_rows)
        fixed[places["ids"]][batch.num_tokens : num_ids] = 0
        if num_padded_rows > num_rows:
            padding = slice(num_rows, num_padded_rows)
            fixed[places["query_starts"]][num_rows + 1 : num_padded_rows + 1] = np.arange(num_rows, num_padded_rows) + 1
            for name in ("context_lens", "logit_context_lens"):
                fixed[places[name]][padding] = 0
            for name in ("slots", "logit_slots"):
                fixed[places[name]][padding] = -1
            fixed[places["logit_tokens"]][padding] = np.arange(num_rows, num_padded_rows)
        return fixed[: places["ids"].start + num_ids]

    def _write_mixed(self, batch: StepBatch, padding: MixedPadding) -> Ints:
        """Write the step, a row of padding behind it that has all padding tokens, and rows without tokens."""
        fixed, places = self._fixed, self._places
        num_rows, num_decode = batch.num_rows, padding.num_decode
        self._write_rows(batch)
        fixed[places["ids"]][batch.num_tokens : padding.num_tokens] = 0
        fixed[places["query_starts"]][num_rows + 1 :] = _BEYOND_ALL_TOKENS
        fixed[places["context_lens"]][num_rows:] = 0
        fixed[places["slots"]][num_rows:] = -1
        decode_slots = fixed[places["decode_slots"]]
        decode_slots[:num_decode] = batch.slots[:num_decode]
        decode_slots[num_decode:] = -1
        place = places["tiles"]
        tiles = fixed[place.start : place.start + 4 * padding.num_tiles].reshape(-1, 4)
        tiles[: len(padding.tiles)] = padding.tiles
        tiles[len(padding.tiles) :] = (self._limits.max_rows, *_UNUSED_TILE)
        return fixed[: place.start + tiles.size]

    def _write_rows(self, batch: StepBatch) -> None:
        fixed, places = self._fixed, self._places
        num_rows, num_logits = batch.num_rows, batch.num_sampled
        fixed[places["ids"]][: batch.num_tokens] = batch.input_ids
        fixed[places["query_starts"]][: num_rows + 1] = batch.query_starts
        fixed[places["context_lens"]][:num_rows] = batch.context_lens
        fixed[places["slots"]][:num_rows] = batch.slots
        rows, tokens = batch.logit_rows, batch.query_starts[1:][batch.logit_rows] - 1
        if batch.drafts is not None:
            rows = np.concatenate([rows, np.repeat(rows, batch.drafts)])
            tokens = np.concatenate([tokens, batch.verified_tokens])
        fixed[places["logit_tokens"]][:num_logits] = tokens
        starts = fixed[places["logit_query_starts"]]
        starts[:] = np.arange(len(starts))
        contexts = batch.context_lens[rows] + tokens - batch.query_starts[rows]
        fixed[places["logit_context_lens"]][:num_logits] = contexts
        fixed[places["logit_slots"]][:num_logits] = batch.slots[rows]

    def _apply(self, changes: Tensor) -> None:
        n = len(changes) // 3
        grid = (-(-n // _CHANGE_PAGES.num_threads), 1, 1)
        max_pages = np.int32(self._limits.max_pages)
        self._device.launcher.launch(_CHANGE_PAGES, grid, changes, self.page_tables, np.int32(n), max_pages)


def count_decode_rows(batch: StepBatch) -> int:
    """Return the number of rows of one token. Raises ValueError if they do not come first."""
    num_decode = int((np.diff(batch.query_starts) == 1).sum())
    if batch.query_starts[num_decode] != num_decode:
        raise ValueError("rows of one token must come first")
    return num_decode


def _places(limits: StepLimits) -> dict[str, slice]:
    """Return where each fixed array is in the block. Ids of steps that are not mixed may lie where tiles are too."""
    rows, places, start = limits.max_rows, dict[str, slice](), 0
    logits = max(rows, limits.max_verified)
    sizes = {"query_starts": rows + 2, "context_lens": rows + 1, "slots": rows + 1, "decode_slots": rows}
    sizes |= {"logit_query_starts": logits + 1} | dict.fromkeys(
        ("logit_context_lens", "logit_slots", "logit_tokens"), logits
    )
    for name, size in sizes.items():
        places[name] = slice(start, start + size)
        start += aligned(size)
    places["ids"] = slice(start, start + limits.max_tokens)
    start += aligned(limits.mixed_tokens)
    places["tiles"] = slice(start, start + 4 * limits.mixed_tiles)
    return places
