"""The rows of a page store: which content is in which place.

A row is valid if its checksum is, so a process may be killed while it writes one.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import mmap

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
        self._next_number = 0

    def read(self) -> dict[int, tuple[PersistedPage, int]]:
        """Return each valid row by its place, with the checksum of its content; the oldest row first."""
        found: list[tuple[int, PersistedPage, int]] = []
        for place in range(self._num_rows):
            begin = self._start + place * ROW_BYTES
            text = self._mapping[begin : begin + _ROW.size]
            (crc,) = _CRC.unpack_from(self._mapping, begin + _ROW.size)
            page_hash, salt, num_salt_bytes, content_sum, number = _ROW.unpack(text)
            if number and crc == zlib.crc32(text) and num_salt_bytes <= _MAX_SALT_BYTES:
                found.append((number, PersistedPage(place, page_hash, salt[:num_salt_bytes]), content_sum))
        found.sort()
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
