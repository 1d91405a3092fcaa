"""Shared buffers: requested and granted in the handshake, lent and returned with requests."""

from __future__ import annotations

import enum
from typing import Annotated, Literal

from msgspec import Meta, Struct

from penstock.shm.messages.bounds import MAX_CONTEXT_TOKENS, MAX_SHARED_BUFFER_BYTES, MAX_SHARED_BUFFERS, U63

_Handle = Annotated[bytes, Meta(min_length=64, max_length=64)]


class BufferKind(enum.IntEnum):
    """The memory that a shared buffer is in."""

    HOST = 0
    """A memfd."""
    CUDA = 1
    """The backend's GPU, shared by CUDA IPC handles."""


class BufferContent(enum.IntEnum):
    """The content of a shared buffer. The first two go to the backend, the others come from it."""

    TOKENS = 0
    """A prompt; a row is one token id."""
    PROMPT_EMBEDDINGS = 1
    """A prompt; a row is the model's embedding of one token."""
    LOGITS = 2
    """Row i is the distribution from which generated token i was sampled, before sampling parameters change it."""
    HIDDEN_STATES = 3
    """Row i is the last layer's output after the final norm, from which row i of the logits is computed."""

    @property
    def to_backend(self) -> bool:
        return self in (BufferContent.TOKENS, BufferContent.PROMPT_EMBEDDINGS)


class BufferRef(Struct, frozen=True, array_like=True, tag=21, forbid_unknown_fields=True):
    """A client lends one of its shared buffers to the backend, until the `BufferReturn` of the same generation.

    generation grows with each loan of a buffer, so that a late message about an earlier loan is recognised.
    """

    index: Annotated[int, Meta(ge=0, lt=MAX_SHARED_BUFFERS)]
    generation: U63
    content: BufferContent
    num_rows: Annotated[int, Meta(ge=1, le=MAX_CONTEXT_TOKENS)]


class BufferReturn(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The backend ends a loan: the buffer is its client's again. The first num_rows rows were written.

    A buffer on a device may be touched once its event has passed.
    """

    index: Annotated[int, Meta(ge=0, lt=MAX_SHARED_BUFFERS)]
    generation: U63
    num_rows: Annotated[int, Meta(ge=0, le=MAX_CONTEXT_TOKENS)]


class BufferRequest(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The shared buffers that a client asks for, for the time of its connection."""

    num_buffers: Annotated[int, Meta(ge=1, le=MAX_SHARED_BUFFERS)]
    num_bytes: Annotated[int, Meta(ge=1, le=MAX_SHARED_BUFFER_BYTES)]
    """Bytes of each buffer."""
    kinds: Annotated[tuple[BufferKind, ...], Meta(min_length=1, max_length=2)] = (BufferKind.HOST,)
    """The kinds that the client can use."""


class ContentSpec(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A content that the backend takes or returns: each row has num_values little-endian values of 4 bytes."""

    content: BufferContent
    num_values: Annotated[int, Meta(ge=1, le=1 << 24)]
    dtype: Literal["<i4", "<f4"]
    """In numpy's notation."""

    @property
    def row_bytes(self) -> int:
        return 4 * self.num_values


class BufferGrant(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The shared buffers that a client receives. They are the backend's memory: clients never name memory to open.

    HOST: one more fd, after the three of the welcome, holds all buffers back to back. CUDA: each buffer has a handle of
    an allocation and a handle of an event, on the device with this UUID.
    """

    kind: BufferKind
    num_buffers: Annotated[int, Meta(ge=1, le=MAX_SHARED_BUFFERS)]
    num_bytes: Annotated[int, Meta(ge=1, le=MAX_SHARED_BUFFER_BYTES)]
    """Bytes of each buffer, at least what the client asked for."""
    contents: Annotated[tuple[ContentSpec, ...], Meta(max_length=8)]
    device_uuid: Annotated[bytes, Meta(max_length=16)] = b""
    memory_handles: Annotated[tuple[_Handle, ...], Meta(max_length=MAX_SHARED_BUFFERS)] = ()
    event_handles: Annotated[tuple[_Handle, ...], Meta(max_length=MAX_SHARED_BUFFERS)] = ()

    def spec_of(self, content: BufferContent) -> ContentSpec | None:
        return next((spec for spec in self.contents if spec.content is content), None)
