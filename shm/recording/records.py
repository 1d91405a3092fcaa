"""The frame of every record: its length, kind and time. A kind that is unknown is skipped by readers."""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

FORMAT_VERSION = 2
"""The version of rings and files. A reader refuses another one."""

FRAME = struct.Struct("<IHHd")
"""Length in bytes, kind, flags, time in seconds of CLOCK_MONOTONIC."""
ALIGNMENT = 8


class Kind(enum.IntEnum):
    EVENT = 1
    """One of `events.Event`."""
    PLAN = 2
    RESULT = 3
    TOKENS = 4
    """The sampled tokens of a step. Written only if the backend may record tokens, like PROMPT."""
    PROMPT = 5
    """A part of an encoded request with its tokens."""


SECRET_KINDS = frozenset({Kind.TOKENS, Kind.PROMPT})
"""They contain tokens: a client's input and output."""


class Record(NamedTuple):
    kind: int
    flags: int
    time_s: float
    body: bytes
    """With up to 7 bytes of padding at its end."""


def padding(num_bytes: int) -> bytes:
    """Zero bytes to append to this many bytes, so that the next field or record is aligned."""
    return bytes(-num_bytes % ALIGNMENT)


def pack(kind: int, time_s: float, body: bytes) -> bytes:
    body += padding(len(body))
    return FRAME.pack(FRAME.size + len(body), kind, 0, time_s) + body


def unpack(data: bytes) -> Record:
    """Raises ValueError for a record that is shorter than its frame."""
    if len(data) < FRAME.size:
        raise ValueError(f"a record of {len(data)} bytes")
    _, kind, flags, time_s = FRAME.unpack_from(data)
    return Record(kind, flags, time_s, data[FRAME.size :])
