"""Requests that outlive their frontend for a while: the stream that they belong to, and questions about it."""

from __future__ import annotations

import enum
from typing import Annotated, Literal

from msgspec import Meta, Struct

from penstock.shm.messages.bounds import MAX_RECORD_BYTES, U63

MAX_LINGER_S = 3600
"""Longest time that the messages carry; a frontend may allow less."""


class StreamName(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A stream of one tenant. A question of another tenant does not find it."""

    tenant: Annotated[bytes, Meta(max_length=16)]
    """The owner of the API key, which is empty without keys."""
    stream_id: Annotated[str, Meta(min_length=1, max_length=128)]


class Linger(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The request runs on for linger_s after its reader has gone, and its tokens are kept as long.

    A second Generate with the same stream and choice receives the tokens from the beginning, whoever sends it, and the
    earlier reader ends as FAILED, TAKEN_OVER. If the backend has kept nothing, it begins like any other request. So a
    frontend may submit the same request again without knowing what the backend has kept.
    """

    stream: StreamName
    linger_s: Annotated[int, Meta(ge=1, le=MAX_LINGER_S)]
    choice: Annotated[int, Meta(ge=0, le=(1 << 16) - 1)] = 0
    """The choice's number among the requests of the stream."""
    record: Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)] = b""
    """Data that a frontend needs to write the stream again, for any of its requests. The backend does not read it."""


class Keep(enum.IntEnum):
    """Parts of a lingering request that remain after a Cancel. Without `Linger` nothing remains."""

    NOTHING = 0
    TOKENS = 1
    """Its tokens so far; it stops running."""
    ALL = 2
    """Its reader has gone; it runs on."""


class StreamQuestion(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Read the stream's record, or drop everything kept of the stream."""

    stream: StreamName
    action: Literal["read", "drop"]


class StreamRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The answer to a question that reads. It comes before or with the event that ends the question."""

    request_id: U63
    data: Annotated[bytes, Meta(max_length=MAX_RECORD_BYTES)]
