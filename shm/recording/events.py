"""Records written once per request or sequence, as tagged Structs. None contains a token."""

from __future__ import annotations

import struct
from typing import TypeAlias

import msgspec
from msgspec import Struct

from penstock.shm.recording.records import Kind, pack

_LENGTH = struct.Struct("<I")


class BackendStarted(Struct, frozen=True, array_like=True, tag=1):
    """A backend begins. Earlier backends' sequences and requests are gone. The ring's note also has this event."""

    version: int
    """FORMAT_VERSION of the writer."""
    pid: int
    wall_s: float
    """Seconds since 1970 at the record's time."""
    model: str
    max_running: int
    max_batch_tokens: int
    num_pages: int
    """0 for a model without a KV cache; then the following fields are 0 too."""
    page_size: int
    max_context: int
    vocab_size: int
    max_waiting: int
    num_plans_ahead: int
    priority_step_s: float = 0.0
    keeps_state: bool = False
    kv_windows: tuple[int | None, ...] = (None,)
    has_tokens: bool = False
    """Tokens and prompts are recorded too."""
    protocol_version: int = 0
    """PROTOCOL_VERSION of the writer: prompts are recorded as messages, which another version would misread."""
    adapters: tuple[str, ...] = ()
    """The ids of its adapters."""
    num_checkpoints: int = 0


class Arrived(Struct, frozen=True, array_like=True, tag=2):
    """A request comes in, before it is checked. frontend and request_id name it in all other events."""

    frontend: int
    request_id: int
    num_prompt_tokens: int
    num_tokens: int
    """The prompt's tokens, and those that an earlier backend generated."""
    max_tokens: int
    tenant: str
    """The tenant's digest in the backend; empty if all requests belong to one tenant."""
    weight: float
    priority: int
    timeout_ms: int
    is_resumed: bool
    may_share: bool
    is_greedy: bool
    has_grammar: bool
    pooled: str
    """The kind of vector that it asks for; empty for generated tokens."""
    adapter: str = ""
    """The id of its adapter; empty for the model alone."""


class Joined(Struct, frozen=True, array_like=True, tag=3):
    """The request is coalesced with the sequence; -1 for one that is not scheduled yet."""

    frontend: int
    request_id: int
    sequence: int


class Started(Struct, frozen=True, array_like=True, tag=4):
    """A sequence gets a slot, or is rewound in it. requests are its listeners now."""

    sequence: int
    slot: int
    num_tokens: int
    """Known tokens."""
    num_cached: int
    """Known tokens whose keys and values were cached."""
    num_restored_pages: int
    requests: tuple[tuple[int, int], ...]
    prints: bytes = b""
    """8 bytes of the hash of each full page at the beginning. Equal prints are equal beginnings.

    The hashes have a key that is not recorded, so nobody can test which tokens they belong to.
    """


class Preempted(Struct, frozen=True, array_like=True, tag=5):
    sequence: int


class Ended(Struct, frozen=True, array_like=True, tag=6):
    """The last event of a request is sent. finish is a `Finish`, code a `FailureCode` or -1."""

    frontend: int
    request_id: int
    finish: int
    code: int


class Left(Struct, frozen=True, array_like=True, tag=7):
    """A request leaves its sequence, which has num_tokens tokens by then: it has ended or was cancelled."""

    frontend: int
    request_id: int
    sequence: int
    num_tokens: int


class Cancelled(Struct, frozen=True, array_like=True, tag=8):
    frontend: int
    request_id: int


class FrontendDied(Struct, frozen=True, array_like=True, tag=9):
    frontend: int


class StepFailed(Struct, frozen=True, array_like=True, tag=10):
    """error is the exception's class: its text may quote a client's input."""

    step: int
    error: str


Event: TypeAlias = (
    BackendStarted | Arrived | Joined | Started | Preempted | Ended | Left | Cancelled | FrontendDied | StepFailed
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def pack_event(event: Event, time_s: float) -> bytes:
    body = _encoder.encode(event)
    return pack(Kind.EVENT, time_s, _LENGTH.pack(len(body)) + body)


def unpack_event(body: bytes) -> Event:
    """Raises ValueError."""
    if len(body) < _LENGTH.size:
        raise ValueError("an event without a length")
    (length,) = _LENGTH.unpack_from(body)
    try:
        return _decoder.decode(body[_LENGTH.size : _LENGTH.size + length])
    except msgspec.MsgspecError as error:
        raise ValueError(f"an event cannot be read: {error}") from None
