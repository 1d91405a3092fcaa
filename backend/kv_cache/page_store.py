"""`PageStore`: shared memory with places for KV pages, which the next backend finds there.

A row for each place says which content is there. It is valid if its checksum is, so a process may be killed while it
writes one. A backend opens the store by `open_store` when it starts with `--persist-kv`.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.backend.checkpoint.fingerprint import packing_fingerprint
from penstock.backend.checksum import block_sum
from penstock.backend.errors import NoRoomBeside, StartupError
from penstock.backend.forward_pass import IBatchedForwardPass
from penstock.backend.forward_pass.extensions import IPersistsPages
from penstock.backend.kv_cache.budget.kv_plan import KvPlan
from penstock.backend.kv_cache.budget.memory import MemoryInfo
from penstock.backend.kv_cache.budget.whole_plan import WholePlan
from penstock.backend.kv_cache.page_hash import use_secret
from penstock.process.options import format_size

ROW_BYTES = 64
_ROW = struct.Struct("<16s16sBxxxIQ")  # hash, salt, length of the salt, sum of the content, number
_CRC = struct.Struct("<I")
_MAX_SALT_BYTES = 16


class PersistedPage(NamedTuple):
    """A page that an earlier process has saved."""

    place: int
    page_hash: bytes
    salt: bytes


class PageRows:
    """One row for each place. One process writes them, on one thread."""

    def __init__(self, mapping: mmap.mmap, start: int, num_rows: int) -> None:
        self._mapping = mapping
        self._start = start
        self._num_rows = num_rows
        self._next_number = 1

    def row(self, place: int) -> tuple[int, PersistedPage, int] | None:
        """Return a row's number, its page and the checksum of its content; None if it is not valid."""
        begin = self._start + place * ROW_BYTES
        text = self._mapping[begin : begin + _ROW.size]
        (crc,) = _CRC.unpack_from(self._mapping, begin + _ROW.size)
        page_hash, salt, num_salt_bytes, content_sum, number = _ROW.unpack(text)
        if not number or crc != zlib.crc32(text) or num_salt_bytes > _MAX_SALT_BYTES:
            return None
        return number, PersistedPage(place, page_hash, salt[:num_salt_bytes]), content_sum

    def read(self) -> dict[int, tuple[PersistedPage, int]]:
        """Return each valid row by its place, with the checksum of its content; the oldest row first."""
        found = sorted(row for row in map(self.row, range(self._num_rows)) if row is not None)
        self._next_number = found[-1][0] + 1 if found else 1
        return {page.place: (page, content_sum) for _, page, content_sum in found}

    def write(self, page: PersistedPage, content_sum: int) -> None:
        text = _ROW.pack(page.page_hash, page.salt, len(page.salt), content_sum, self._next_number)
        self._next_number += 1
        begin = self._start + page.place * ROW_BYTES
        self._mapping[begin : begin + _ROW.size + _CRC.size] = text + _CRC.pack(zlib.crc32(text))

    def clear(self, place: int) -> None:
        begin = self._start + place * ROW_BYTES
        self._mapping[begin : begin + ROW_BYTES] = bytes(ROW_BYTES)


_MAGIC = b"PNSTKV02"
_HEADER = struct.Struct("<8s32s32sQQQQ")  # magic, key, secret, then bytes and places: of pages, of states
_HEADER_BYTES = 4096
KEY_BYTES = 32
_ALIGNMENT = 64
MAX_PLACES = 1 << 20
"""A start reads this many rows in about a second."""


class PageStoreError(Exception):
    """The store cannot be used. The message is one line."""


class StatePlaces:
    """The places of a store that are for checkpoints of states. Their numbers come behind those for pages."""

    def __init__(self, store: PageStore, num_places: int, found: list[PersistedPage]) -> None:
        self.first_place = store.num_places
        self.num_places = num_places
        self.found = found
        self.publish, self.withdraw, self.is_intact = store.publish, store.withdraw, store.is_intact


class PageStore:
    """Places for pages, which one process at a time uses; and for checkpoints of states, if the model has any.

    A row identifies the content of a place. It is cleared before other content is written there, and written when that
    is complete. So whenever the process is killed, a valid row means complete content. The content's checksum, compared
    when a later process uses it, detects all other damage.
    """

    first_place = 0

    def __init__(self, fd: int, key: bytes, page_bytes: int, state_bytes: int = 0, num_states: int = 0) -> None:
        """Use the whole memfd, whose fd stays the caller's; its memory is allocated now.

        Existing content is kept if it was written with the same key and sizes. Raises PageStoreError.
        """
        num_bytes = os.fstat(fd).st_size
        place_bytes, state_place_bytes = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in (page_bytes, state_bytes))
        self._sizes = page_bytes, state_bytes
        left_bytes = num_bytes - _HEADER_BYTES - num_states * (state_place_bytes + ROW_BYTES)
        self.num_places = min(max(0, left_bytes) // (place_bytes + ROW_BYTES), MAX_PLACES)
        if not self.num_places:
            raise PageStoreError(f"{num_bytes} bytes hold no page of {page_bytes} bytes")
        rows_end = _HEADER_BYTES + (self.num_places + num_states) * ROW_BYTES
        try:
            # It belongs to this process, not to the open file: a child that inherits the fd has no part in it.
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, num_bytes)
            self._mapping = mmap.mmap(fd, num_bytes)
        except BlockingIOError:
            raise PageStoreError("another process uses it") from None
        except OSError as error:
            raise PageStoreError(str(error.strerror)) from None
        self._rows = PageRows(self._mapping, _HEADER_BYTES, self.num_places + num_states)
        self.secret = self._begin(key, (page_bytes, self.num_places, state_bytes, num_states), rows_end)
        """For the hashes of pages, which must be the same in all processes that use the store."""
        pages_end = rows_end + self.num_places * place_bytes
        parts = (rows_end, self.num_places, place_bytes), (pages_end, num_states, state_place_bytes)
        memory = np.frombuffer(self._mapping, np.uint8)
        self._places, self._states = (
            memory[start : start + count * size].reshape(count, size) for start, count, size in parts
        )
        found = self._rows.read()
        self._sums = {place: content_sum for place, (_, content_sum) in found.items()}
        pages = [page for page, _ in found.values()]
        self.found = [page for page in pages if page.place < self.num_places]
        """Pages of earlier processes, in the order in which they were saved."""
        states = [page for page in pages if page.place >= self.num_places]
        self.states = StatePlaces(self, num_states, states) if num_states else None

    def _begin(self, key: bytes, sizes: tuple[int, ...], rows_end: int) -> bytes:
        """Return the secret. Rows of another key or other sizes are cleared."""
        magic, known, secret, *known_sizes = _HEADER.unpack_from(self._mapping)
        if (magic, known, *known_sizes) != (_MAGIC, key, *sizes):
            self._mapping[:rows_end] = bytes(rows_end)
            secret = secrets.token_bytes(32)
            _HEADER.pack_into(self._mapping, 0, _MAGIC, key, secret, *sizes)
        return bytes(secret)

    def place(self, index: int) -> NDArray[np.uint8]:
        """The memory of a place, [page bytes] or [state bytes]."""
        return self._memory(index)[: self._sizes[index >= self.num_places]]

    def _memory(self, index: int) -> NDArray[np.uint8]:
        is_page = index < self.num_places
        memory: NDArray[np.uint8] = self._places[index] if is_page else self._states[index - self.num_places]
        return memory

    def note_written(self, index: int) -> None:
        """Note that the content of the place is complete. May be called on another thread than the other methods."""
        self._sums[index] = block_sum(self._memory(index))

    def publish(self, page: PersistedPage) -> None:
        """Let later processes find the content, for which `note_written` has returned."""
        self._rows.write(page, self._sums[page.place])

    def withdraw(self, index: int) -> None:
        """Let no process find the content any more."""
        self._rows.clear(index)

    def is_intact(self, index: int) -> bool:
        """Whether the content is still what was published."""
        return block_sum(self._memory(index)) == self._sums[index]


logger = logging.getLogger("penstock.backend")


def open_store(
    fd: int | None,
    forward_pass: IBatchedForwardPass,
    plan: KvPlan | WholePlan,
    model_dir: Path,
    fingerprint: str,
    memory: MemoryInfo,
    *,
    beside_another: bool,
) -> PageStore | None:
    """Give the pass host pages in the memory of the fd.

    Returns None, with a line in the log, if its pages cannot be kept. Without an fd no pages are kept. fingerprint is
    the model's, memory the host's. Call it before a page is hashed. Raises StartupError; NoRoomBeside if memory is
    missing beside another backend.
    """
    if fd is None:
        return None
    spec = forward_pass.spec
    if not isinstance(plan, KvPlan) or not isinstance(forward_pass, IPersistsPages):
        logger.info("pages end with this process: its forward pass cannot leave them")
        return None
    if (spec.state_bytes_per_sequence and not plan.num_checkpoints) or plan.groups.has_windows:
        logger.info("pages end with this process: they alone do not say how a sequence of this model goes on")
        return None
    size, page_bytes = os.fstat(fd), plan.page_size_tokens * plan.bytes_per_token
    if (missing := size.st_size - 512 * size.st_blocks) > memory.free_bytes:
        no_memory = NoRoomBeside if beside_another else StartupError
        raise no_memory(
            f"--persist-kv is {format_size(size.st_size)}; {format_size(max(0, memory.free_bytes))} are free on "
            f"{memory.name}, {format_size(missing)} are needed: lower --persist-kv"
        )
    key = packing_fingerprint(model_dir, (fingerprint, plan.kv_dtype, page_bytes, plan.page_size_tokens))
    state_bytes = spec.state_bytes_per_sequence
    num_states = size.st_size * plan.checkpoint_bytes // (plan.num_bytes + plan.checkpoint_bytes) // max(1, state_bytes)
    try:
        store = PageStore(fd, bytes.fromhex(key), page_bytes, state_bytes, num_states)
    except PageStoreError as error:
        raise StartupError(f"--persist-kv: {error}") from None
    use_secret(store.secret)
    forward_pass.persist_pages(store)
    logger.info(
        "pages are kept for the next backend: %d of %s; %d of an earlier one are there",
        store.num_places, format_size(page_bytes), len(store.found),
    )  # fmt: skip
    if store.states is not None:
        logger.info(
            "and checkpoints: %d of %s; %d of an earlier one are there",
            num_states, format_size(state_bytes), len(store.states.found),
        )  # fmt: skip
    return store
