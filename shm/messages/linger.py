"""Requests that outlive their frontend for a while: the stream that they belong to, and questions about it."""

from __future__ import annotations

import enum
from typing import Annotated, Literal

from msgspec import Meta, Struct

from penstock.shm.messages.bounds import MAX_RECORD_BYTES, U63

MAX_LINGER_S = 3600
"""Longest time that the messages carry; a frontend may allow less."""


class StreamName(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A stream of one tenant. Nobody else's question finds it."""

    tenant: Annotated[bytes, Meta(max_length=16)]
    """The owner of the API key, which is empty without keys."""
    stream_id: Annotated[str, Meta(min_length=1, max_length=128)]


class Linger(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The request runs on for linger_s after its reader has gone, and its tokens are kept as long.

    A second Submit with the same stream and choice receives the tokens from the beginning, whoever sends it, and the
    reader before it ends as FAILED, TAKEN_OVER. Otherwise it begins like any other request. So a frontend may submit
    the same request again without knowing what the backend has kept.
    """

    stream: StreamName
    linger_s: Annotated[int, Meta(ge=1, le=MAX_LINGER_S)]
    choice: Annotated[int, Meta(ge=0, le=(1 << 16) - 1)] = 0
    """Its number among the requests of the stream."""
    record: Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)] = b""
    """What a frontend needs to write the stream again; of any of its requests. The backend does not read it."""


class Keep(enum.IntEnum):
    """What a cancelled request leaves behind if it lingers; another one leaves nothing."""

    NOTHING = 0
    TOKENS = 1
    """It runs no further. Its tokens so far are all that the stream needs."""
    ALL = 2
    """Its reader has gone; it runs on."""


class StreamQuestion(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Read the stream's record, or drop all that is kept of the stream."""

    stream: StreamName
    action: Literal["read", "drop"]


class StreamRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The answer to a question that reads. Comes before or with the event that ends the question."""

    request_id: U63
    data: Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)]
