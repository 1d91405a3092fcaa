"""Pages, and checkpoints of states, that a backend leaves to its successor while both run: the successor computes only
what is missing.

The supervisor gives both memfds without memory, for pages and for checkpoints; the rest holds for each. When the
successor is ready, the old backend copies the full pages of its running sequences there, some with each step, and then
each page that fills. The successor finds them at once. When the old backend has ended, it frees the memory; later it
leaves pages in the same way.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.backend.checkpoint.fingerprint import packing_fingerprint
from penstock.backend.checksum import block_sum
from penstock.backend.forward_pass import IBatchedForwardPass
from penstock.backend.forward_pass.extensions import IPersistsPages
from penstock.backend.kv_cache.budget.kv_plan import KvPlan
from penstock.backend.kv_cache.budget.memory import host_memory
from penstock.backend.kv_cache.budget.whole_plan import WholePlan
from penstock.backend.kv_cache.host_offload import HostOffload
from penstock.backend.kv_cache.page_hash import use_secret
from penstock.backend.kv_cache.page_store import ROW_BYTES, PageRows, PersistedPage

logger = logging.getLogger("penstock.backend")

_MAGIC = b"PNSTKH01"
_HEADER = struct.Struct("<8s32s32sQQ")  # magic, key, secret, bytes of a page, places
_LOCK = struct.Struct("hhqqi4x")  # struct flock: kind, whence, first byte, bytes, pid
_HEADER_BYTES = 4096
_ALIGNMENT = 64
_SAVES_PER_STEP, _SAVED_BYTES = 16, 8_000_000
"""A page of 400 KB takes about 0.2 ms, which the step's streams wait for. A step saves at least one."""
FIRST_STATE_PLACE = 1 << 30
"""The places of checkpoints have numbers from here on."""
_LOOKS_EVERY_S = 1.0
_WITHDRAWN = bytes(16)
"""In a row: another backend need not wait for a page here."""


class HandOverMemory:
    """The memory of one server's backend and its successors. One of them writes, and holds the lock of byte 0. Those
    that follow share that of byte 1: until they have ended, nobody else begins to write."""

    states: HandOverMemory | None = None
    """That of the checkpoints, in the memory of the pages."""

    def __init__(self, fd: int, key: bytes, page_bytes: int, num_pages: int, first_place: int = 0) -> None:
        """The fd stays the caller's. follows becomes true if another backend with the same key uses it now; if one
        with another key does, is_usable is false. num_pages are those that this backend may leave."""
        self.first_place = first_place
        self._shared_fd = fd
        # Another description of the file, for its locks: those of the process end when any of its fds is closed.
        self._fd = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._key = key
        self.page_bytes = page_bytes
        self._place_bytes = -(-page_bytes // _ALIGNMENT) * _ALIGNMENT
        self._num_pages = num_pages
        self._sums: dict[int, int] = {}
        self.num_places = 0
        self.found: Sequence[PersistedPage] = ()
        self.secret = secrets.token_bytes(len(key))
        """For the hashes of pages, which must be the same in both backends."""
        self.follows = self.is_usable = False
        if self.takes_over():
            self.begin()
            self.is_usable = True
            return
        header = os.pread(self._fd, _HEADER.size, 0) if self._lock(fcntl.F_RDLCK, 1, 1) else b""
        if len(header) == _HEADER.size:
            magic, known, secret, known_bytes, num_places = _HEADER.unpack(header)
            is_whole = os.fstat(self._fd).st_size == self._rows_end(num_places) + num_places * self._place_bytes
            if (magic, known, known_bytes) == (_MAGIC, key, page_bytes) and is_whole:
                self.secret, self.follows, self.is_usable = secret, True, True
                self._map(num_places)
                return
        self._lock(fcntl.F_UNLCK, 1, 1)

    def takes_over(self) -> bool:
        """Whether no other process uses the memory; then this one does, alone until `begin`."""
        return self._lock(fcntl.F_WRLCK, 0, 2)

    def _lock(self, kind: int, first: int, count: int) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _LOCK.pack(kind, os.SEEK_SET, first, count, 0))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def begin(self) -> None:
        """Begin to be the writer, without pages. No page of this memory is in use, and no other process maps it."""
        self.follows = False
        self._sums.clear()
        os.ftruncate(self._fd, 0)  # frees it
        self._map(self._num_pages)
        _HEADER.pack_into(self._mapping, 0, _MAGIC, self._key, self.secret, self.page_bytes, self.num_places)
        self._lock(fcntl.F_UNLCK, 1, 1)

    def _map(self, num_places: int) -> None:
        """Map that many places. Memory is allocated when they are written."""
        rows_end = self._rows_end(num_places)
        num_bytes = rows_end + num_places * self._place_bytes
        if not self.follows:
            os.ftruncate(self._fd, num_bytes)
        self._mapping = mmap.mmap(self._shared_fd, num_bytes)
        self._rows = PageRows(self._mapping, _HEADER_BYTES, num_places)
        memory = np.frombuffer(self._mapping, np.uint8, num_places * self._place_bytes, rows_end)
        self._places = memory.reshape(num_places, self._place_bytes)
        self.num_places = num_places

    @staticmethod
    def _rows_end(num_places: int) -> int:
        return -(-(_HEADER_BYTES + num_places * ROW_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE

    def close(self) -> None:
        """Give the locks back, before anything is handed over."""
        os.close(self._fd)

    def follow(self, place: int) -> PersistedPage | None:
        """Return what the other backend has left at this place; None if it is nothing yet."""
        index = place - self.first_place
        if index >= self.num_places or (row := self._rows.row(index)) is None:
            return None
        _, page, self._sums[place] = row
        return page._replace(place=place)

    def place(self, index: int) -> NDArray[np.uint8]:
        """The memory of a place, [page bytes], or [state bytes]."""
        if self.states is not None and index >= self.states.first_place:
            return self.states.place(index)
        return self._places[index - self.first_place, : self.page_bytes]

    def note_written(self, index: int) -> None:
        """Note that the content of the place is complete. May be called on another thread than the other methods."""
        if self.states is not None and index >= self.states.first_place:
            self.states.note_written(index)
        else:
            self._sums[index] = self._sum(index)

    def publish(self, page: PersistedPage) -> None:
        """Let the successor find the content, for which `note_written` has returned."""
        self._rows.write(page._replace(place=page.place - self.first_place), self._sums[page.place])

    def withdraw(self, index: int) -> None:
        if not self.follows:
            self._rows.write(PersistedPage(index - self.first_place, _WITHDRAWN, b""), 0)

    def is_intact(self, index: int) -> bool:
        return self._sum(index) == self._sums[index]

    def _sum(self, index: int) -> int:
        return block_sum(self._places[index - self.first_place])


class HandOver(HostOffload):
    """Finds the pages of the backend before this one, and leaves pages to the next one."""

    def __init__(self, memory: HandOverMemory, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(0)
        self._store = self._memory = memory
        self._clock = clock
        self._num_host_pages = 0
        self._num_followed = memory.first_place
        self._num_steps_in_flight = -1
        """Steps that may still read pages of a backend that has ended; -1 while it lives."""
        self._look_s = 0.0
        self._is_leaving = False
        self._to_leave: dict[bytes, None] = {}
        self._find: Callable[[bytes], tuple[int, bytes] | None] = lambda _: None

    @property
    def saves_all(self) -> bool:
        return self._is_leaving

    def contains(self, page_hash: bytes) -> bool:
        if self._memory.follows and self._num_steps_in_flight < 0:
            while (page := self._memory.follow(self._num_followed)) is not None:
                self._num_followed += 1
                if page.page_hash != _WITHDRAWN:
                    self._num_host_pages += 1
                    self._add_found(page)
        return super().contains(page_hash)

    def save(self, page: int, page_hash: bytes, salt: bytes) -> None:
        if self._is_leaving:
            super().save(page, page_hash, salt)

    def leave(self, page_hashes: Iterable[bytes], find: Callable[[bytes], tuple[int, bytes] | None]) -> None:
        """Begin to leave pages: first these, then each that fills. find returns a page and its salt by its hash."""
        if self._memory.follows or self._is_leaving:
            return
        hashes, memory = dict.fromkeys(page_hashes), host_memory()
        if 2 * len(hashes) * self._memory.page_bytes > memory.free_bytes:
            logger.info("no pages are left to the next backend: there is no memory for them")
            return
        self._to_leave = hashes
        self._is_leaving, self._find = True, find
        self._num_host_pages = self._memory.num_places
        first = self._memory.first_place
        self._free = list(range(first + self._num_host_pages - 1, first - 1, -1))

    def _free_host_page(self) -> int | None:
        return self._free.pop() if self._free else None

    def discard(self, page_hashes: list[bytes]) -> None:
        """A place is written once: the successor may be reading it."""
        num_free = len(self._free)
        super().discard(page_hashes)
        if self._is_leaving:
            self._num_host_pages -= len(self._free) - num_free
            del self._free[num_free:]

    def take_saves(self) -> tuple[tuple[int, int], ...]:
        most = min(_SAVES_PER_STEP, max(1, _SAVED_BYTES // self._memory.page_bytes))
        for page_hash in list(self._to_leave)[:most]:
            del self._to_leave[page_hash]
            if (found := self._find(page_hash)) is not None:
                self.save(found[0], page_hash, found[1])
        return super().take_saves()

    def note_step_ended(self) -> None:
        super().note_step_ended()
        if not self._memory.follows:
            return
        now_s = self._clock()
        if self._num_steps_in_flight < 0 and now_s >= self._look_s:
            self._look_s = now_s + _LOOKS_EVERY_S
            if self._memory.takes_over():
                self._num_steps_in_flight = len(self._copying)
                for page_hash in list(self._saved):
                    self._forget(page_hash)
                self._num_host_pages = 0
        elif self._num_steps_in_flight > 0:
            self._num_steps_in_flight -= 1
        if self._num_steps_in_flight == 0:
            self._memory.begin()
            self._num_steps_in_flight = -1


def open_hand_over(
    fds: tuple[int, ...],
    forward_pass: IBatchedForwardPass,
    plan: KvPlan | WholePlan,
    model_dir: Path,
    fingerprint: str,
) -> HandOverMemory | None:
    """Give the pass host pages in the memory of the first fd, and places for checkpoints in that of the second; None if
    its pages cannot be handed over. Call it before a page is hashed."""
    state_bytes = forward_pass.spec.state_bytes_per_sequence
    if len(fds) < 2 or not isinstance(plan, KvPlan) or not isinstance(forward_pass, IPersistsPages):
        return None
    if (state_bytes and not plan.num_checkpoints) or plan.groups.has_windows or plan.groups.count > 1:
        return None
    page_bytes = plan.page_size_tokens * plan.bytes_per_token
    kinds = fingerprint, plan.kv_dtype, page_bytes, plan.page_size_tokens, state_bytes
    key = bytes.fromhex(packing_fingerprint(model_dir, kinds))
    memory = HandOverMemory(fds[0], key, page_bytes, plan.num_pages)
    memories = [memory]
    if state_bytes:
        memory.states = HandOverMemory(fds[1], key, state_bytes, plan.num_checkpoints, FIRST_STATE_PLACE)
        memories.append(memory.states)
    if not all(each.is_usable for each in memories):
        for each in memories:
            each.close()
        return None
    use_secret(memory.secret)
    forward_pass.persist_pages(memory)
    return memory
