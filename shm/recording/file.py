"""Recordings on disk: a magic number with a version, then pieces of a ring, each with its checksum.

A file that is cut off or damaged is read up to there. Files belong to this user alone (mode 600).
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from penstock.shm.memory.ring import Stretch
from penstock.shm.recording.records import ALIGNMENT, FORMAT_VERSION, FRAME, SECRET_KINDS, Record, unpack

_MAGIC = b"PENSTREC"
_HEADER = struct.Struct("<8sII")  # magic, version, 0
_PIECE = struct.Struct("<IIQQ")  # crc32 of the rest, bytes of records, begin and end in the ring
_MAX_PIECE_BYTES = 1 << 20


class RecordingError(ValueError):
    """The file is no recording that this version can read. The message is one sentence."""


@dataclass(slots=True)
class Recording:
    """The records of a file, up to the first damage."""

    records: list[Record] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)
    """Indices of records before which others are missing, because the ring was overwritten before they were read."""
    problem: str = ""
    """Why the end of the file could not be read: one sentence; empty if it could."""


class RecordingWriter:
    """Writes a new file. Records with tokens are left out unless asked for."""

    def __init__(self, path: Path, *, with_tokens: bool = False) -> None:
        """Raises FileExistsError and other OSErrors."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file: BinaryIO = os.fdopen(os.open(path, flags, 0o600), "wb")
        self._with_tokens = with_tokens
        self.num_bytes = self._file.write(_HEADER.pack(_MAGIC, FORMAT_VERSION, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: type[BaseException] | None, _error: object, _traceback: TracebackType | None) -> None:
        self.close()

    def write(self, stretch: Stretch) -> None:
        """Append records that were read from the ring. Raises OSError."""
        begin, piece = stretch.begin, b""
        for record in stretch.records:
            if not self._with_tokens and unpack(record).kind in SECRET_KINDS:
                continue
            if len(piece) + len(record) > _MAX_PIECE_BYTES:
                self._write_piece(begin, begin, piece)
                piece = b""
            piece += record
        self._write_piece(begin, stretch.end, piece)

    def _write_piece(self, begin: int, end: int, records: bytes) -> None:
        piece = _PIECE.pack(0, len(records), begin, end)[4:] + records
        self.num_bytes += self._file.write(struct.pack("<I", zlib.crc32(piece)) + piece)

    def close(self) -> None:
        self._file.close()


def read_recording(path: Path) -> Recording:
    """Raises RecordingError and OSError."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise RecordingError(f"{path} is not a recording of Penstock")
        _, version, _ = _HEADER.unpack(header)
        if version != FORMAT_VERSION:
            raise RecordingError(
                f"{path} is a recording of format {version}; this version of Penstock reads format {FORMAT_VERSION}"
            )
        recording = Recording()
        previous_end: int | None = None
        for begin, end, records in _pieces(file, recording):
            if previous_end not in (None, begin):
                recording.gaps.append(len(recording.records))
            previous_end = end
            recording.records += records
    return recording


def _pieces(file: BinaryIO, recording: Recording) -> Iterator[tuple[int, int, list[Record]]]:
    """Begin, end and records of each piece. The first damaged piece ends them and sets the recording's problem."""
    while head := file.read(_PIECE.size):
        place = file.tell() - len(head)
        if len(head) < _PIECE.size:
            recording.problem = f"it is cut off at byte {place}"
            return
        crc, num_bytes, begin, end = _PIECE.unpack(head)
        data = file.read(num_bytes) if num_bytes <= _MAX_PIECE_BYTES else b""
        if len(data) < num_bytes <= _MAX_PIECE_BYTES:
            recording.problem = f"it is cut off at byte {place}"
            return
        if num_bytes > _MAX_PIECE_BYTES or zlib.crc32(head[4:] + data) != crc:
            recording.problem = f"it is damaged at byte {place}"
            return
        try:
            yield begin, end, list(_split(data))
        except ValueError as error:
            recording.problem = f"it is damaged at byte {place}: {error}"
            return


def _split(data: bytes) -> Iterable[Record]:
    place = 0
    while place < len(data):
        length = FRAME.unpack_from(data, place)[0] if len(data) - place >= FRAME.size else 0
        if not FRAME.size <= length <= len(data) - place or length % ALIGNMENT:
            raise ValueError(f"a record of {length} bytes")
        yield unpack(data[place : place + length])
        place += length
