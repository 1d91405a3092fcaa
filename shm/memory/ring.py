"""A ring of records in shared memory: one writer, any number of readers, who cost the writer nothing.

Positions count bytes since the ring was made and never wrap. The writer copies a record and then publishes the position
behind it. A reader copies what is published and then drops what the writer may have overwritten meanwhile. The ring
consists of blocks, and no record crosses the end of one, so a reader can begin at any block. Records stay readable
after their writer's death, and the next writer continues behind them.

A record begins with its length in bytes (32 bits), a multiple of 8. The length 0 means that the rest of the block is
unused. A note of the last writer, such as its identity, is kept beside the records; they never overwrite it.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from dataclasses import dataclass

from penstock.shm.memory import region

BLOCK_BYTES = 1 << 16
MIN_RING_BYTES = 8 * BLOCK_BYTES
MAX_RECORD_BYTES = BLOCK_BYTES

_MAGIC = 0x50_4E_53_54_52_49_4E_47
_HEADER = struct.Struct("<QQQ")  # magic, bytes of data, written position
_HEADER_BYTES = 4096
_NOTE = struct.Struct("<II")  # bytes, crc32
_NOTE_PLACE = 64
MAX_NOTE_BYTES = _HEADER_BYTES - _NOTE_PLACE - _NOTE.size
_WRITTEN = 2
"""Index of the written position among the header's words."""
_LENGTH = struct.Struct("<I")
_UNUSED = bytes(_LENGTH.size)
_ALIGNMENT = 8
_AHEAD_BYTES = 2 * BLOCK_BYTES
"""At most this much before the published position may already be overwritten: the rest of a block, and a record."""


def create_fd(num_bytes: int) -> int:
    """An fd of an empty ring, for `RingWriter` and `RingReader`; the caller closes it. Raises OSError: no memory.

    num_bytes is at least MIN_RING_BYTES. Records fill whole blocks of it.
    """
    if num_bytes < MIN_RING_BYTES:
        raise ValueError(f"a ring of {num_bytes} bytes; the smallest has {MIN_RING_BYTES}")
    data_bytes = num_bytes // BLOCK_BYTES * BLOCK_BYTES
    fd = region.create("penstock-ring", _HEADER_BYTES + data_bytes)
    os.pwrite(fd, _HEADER.pack(_MAGIC, data_bytes, 0), 0)
    region.seal(fd)
    return fd


class _Ring:
    def __init__(self, fd: int, *, writable: bool) -> None:
        """The fd stays the caller's. Raises RegionError."""
        header = region.attach(fd, _HEADER_BYTES, writable=False)
        magic, num_bytes, _ = _HEADER.unpack_from(header)
        header.close()
        if magic != _MAGIC or num_bytes < MIN_RING_BYTES or num_bytes % BLOCK_BYTES:
            raise region.RegionError("the region is not a ring of records")
        self._mapping: mmap.mmap = region.attach(fd, _HEADER_BYTES + num_bytes, writable=writable)
        self._words = memoryview(self._mapping)[: _HEADER.size].cast("Q")
        self.num_bytes: int = num_bytes

    def close(self) -> None:
        """Other processes keep their mappings."""
        self._words.release()
        self._mapping.close()


class RingWriter(_Ring):
    """The only writer. It continues in the block behind an earlier writer's records."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, writable=True)
        self._position = -(-self._words[_WRITTEN] // _ALIGNMENT) * _ALIGNMENT
        self._place = 0
        self._left = 0
        """Bytes from the place to the end of its block."""
        self._find_place()
        if self._left < BLOCK_BYTES:
            self._begin_block()

    def write_note(self, note: bytes) -> None:
        """Replace the note, which is at most MAX_NOTE_BYTES long."""
        if len(note) > MAX_NOTE_BYTES:
            raise ValueError(f"a note of {len(note)} bytes; there is room for {MAX_NOTE_BYTES}")
        start = _NOTE_PLACE + _NOTE.size
        self._mapping[start : start + len(note)] = note
        _NOTE.pack_into(self._mapping, _NOTE_PLACE, len(note), zlib.crc32(note))

    def append(self, record: bytes) -> None:
        """The record begins with its length and is at most MAX_RECORD_BYTES long."""
        num_bytes = len(record)
        if num_bytes > self._left:
            self._begin_block()
        place = self._place
        self._mapping[place : place + num_bytes] = record
        self._place = place + num_bytes
        self._left -= num_bytes
        self._position = self._words[_WRITTEN] = self._position + num_bytes

    def _begin_block(self) -> None:
        if self._left:
            self._mapping[self._place : self._place + _LENGTH.size] = _UNUSED
        self._position += self._left
        self._find_place()

    def _find_place(self) -> None:
        self._place = _HEADER_BYTES + self._position % self.num_bytes
        self._left = -self._position % BLOCK_BYTES or BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Stretch:
    """All records between two positions."""

    begin: int
    """Later than the requested position if the records in between have been overwritten."""
    end: int
    """Position from which to read on."""
    records: list[bytes]


class RingReader(_Ring):
    """Reads while the writer writes, or after its death."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, writable=False)

    @property
    def written(self) -> int:
        """The position behind the last record."""
        return self._words[_WRITTEN]

    def read_note(self) -> bytes:
        """The writer's note; empty if there is none, or if it is being replaced."""
        length, crc = _NOTE.unpack_from(self._mapping, _NOTE_PLACE)
        start = _NOTE_PLACE + _NOTE.size
        note = self._mapping[start : start + min(length, MAX_NOTE_BYTES)]
        return note if zlib.crc32(note) == crc else b""

    def read(self, begin: int = 0) -> Stretch:
        """Return the records from a position on, at which a record begins; with 0, all that have not been
        overwritten."""
        end = self.written
        begin = position = max(begin, self._oldest(end))
        data = self._copy(begin, end)
        oldest = min(self._oldest(self.written), end)  # the oldest that is still whole
        records = []
        while position < end:
            block_end = (position // BLOCK_BYTES + 1) * BLOCK_BYTES
            if position < oldest:
                position = min(block_end, oldest)
                continue
            (length,) = _LENGTH.unpack_from(data, position - begin)
            if not _LENGTH.size < length <= min(block_end, end) - position or length % _ALIGNMENT:
                position = block_end  # the rest of the block is unused
                continue
            records.append(data[position - begin : position - begin + length])
            position += length
        return Stretch(max(begin, oldest), end, records)

    def _oldest(self, written: int) -> int:
        """The first block whose records cannot be overwritten while the written position is this one."""
        overwritten = written + _AHEAD_BYTES - self.num_bytes
        return max(0, -(-overwritten // BLOCK_BYTES) * BLOCK_BYTES)

    def _copy(self, begin: int, end: int) -> bytes:
        first, length = begin % self.num_bytes, max(0, end - begin)
        start = _HEADER_BYTES + first
        head = self._mapping[start : start + min(length, self.num_bytes - first)]
        return head + self._mapping[_HEADER_BYTES : _HEADER_BYTES + length - len(head)]
