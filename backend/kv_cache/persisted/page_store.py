"""`PageStore`: shared memory with places for KV pages, which the next backend finds there."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.checksum import block_sum
from penstock.backend.kv_cache.persisted.page_rows import ROW_BYTES, PageRows, PersistedPage

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAGIC = b"PNSTKV01"
_HEADER = struct.Struct("<8s32s32sQQ")  # magic, key, secret, bytes of a page, places
_HEADER_BYTES = 4096
KEY_BYTES = 32
_ALIGNMENT = 64
MAX_PLACES = 1 << 20
"""A start reads this many rows in about a second."""


class PageStoreError(Exception):
    """The store cannot be used. The message is one line."""


class PageStore:
    """Places for pages, which one process at a time uses.

    A row identifies the content of a place. It is cleared before other content is written there, and written when that
    is complete. So whenever the process is killed, a valid row means complete content. The content's checksum, compared
    when a later process uses it, detects all other damage.
    """

    def __init__(self, fd: int, key: bytes, page_bytes: int) -> None:
        """Use the whole memfd, whose fd stays the caller's; its memory is allocated now.

        Existing content is kept if it was written with the same key and page size. Raises PageStoreError.
        """
        num_bytes = os.fstat(fd).st_size
        self._place_bytes = -(-page_bytes // _ALIGNMENT) * _ALIGNMENT
        self._page_bytes = page_bytes
        num_fitting = max(0, num_bytes - _HEADER_BYTES) // (self._place_bytes + ROW_BYTES)
        self.num_places = min(num_fitting, MAX_PLACES)
        if not self.num_places:
            raise PageStoreError(f"{num_bytes} bytes hold no page of {page_bytes} bytes")
        rows_end = _HEADER_BYTES + self.num_places * ROW_BYTES
        try:
            # It belongs to this process, not to the open file: a child that inherits the fd has no part in it.
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, num_bytes)
            self._mapping = mmap.mmap(fd, num_bytes)
        except BlockingIOError:
            raise PageStoreError("another process uses it") from None
        except OSError as error:
            raise PageStoreError(str(error.strerror)) from None
        self._rows = PageRows(self._mapping, _HEADER_BYTES, self.num_places)
        self.secret = self._begin(key, page_bytes, rows_end)
        """For the hashes of pages, which must be the same in all processes that use the store."""
        memory = np.frombuffer(self._mapping, np.uint8, self.num_places * self._place_bytes, rows_end)
        self._places = memory.reshape(self.num_places, self._place_bytes)
        found = self._rows.read()
        self._sums = {place: content_sum for place, (_, content_sum) in found.items()}
        self.found = [page for page, _ in found.values()]
        """Pages of earlier processes, in the order in which they were saved."""

    def _begin(self, key: bytes, page_bytes: int, rows_end: int) -> bytes:
        """Return the secret. Rows of another key are cleared."""
        magic, known, secret, known_bytes, num_places = _HEADER.unpack_from(self._mapping)
        if (magic, known, known_bytes, num_places) != (_MAGIC, key, page_bytes, self.num_places):
            self._mapping[:rows_end] = bytes(rows_end)
            secret = secrets.token_bytes(32)
            _HEADER.pack_into(self._mapping, 0, _MAGIC, key, secret, page_bytes, self.num_places)
        return bytes(secret)

    def place(self, index: int) -> NDArray[np.uint8]:
        """The memory of a place, [page bytes]."""
        return self._places[index, : self._page_bytes]

    def note_written(self, index: int) -> None:
        """Note that the content of the place is complete. May be called on another thread than the other methods."""
        self._sums[index] = block_sum(self._places[index])

    def publish(self, page: PersistedPage) -> None:
        """Let later processes find the content, for which `note_written` has returned."""
        self._rows.write(page, self._sums[page.place])

    def withdraw(self, index: int) -> None:
        """Let no process find the content any more."""
        self._rows.clear(index)

    def is_intact(self, index: int) -> bool:
        """Whether the content is still what was published."""
        return block_sum(self._places[index]) == self._sums[index]
