"""Streams that outlive their connection: which requests may ask for it, and what a worker needs to write them again."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.frontend.schemas.chat import ChatBody
from penstock.frontend.transport.errors import invalid, shorten
from penstock.frontend.transport.lingering import LingeringAnswer
from penstock.shm.client import Linger, StreamName
from penstock.shm.messages import MAX_RECORD_BYTES

if TYPE_CHECKING:
    from penstock.frontend.generation.served_model import ServedModel
    from penstock.frontend.schemas.decoding import AnsweredBody
    from penstock.frontend.transport.exchange import Exchange
    from penstock.shm.client import BackendClient

_HEADER = "X-Penstock-Linger"
STREAM_HEADER = b"x-penstock-stream"
_SEED_BITS = 63
_MAX_REST_BYTES = 1024
"""A record without its body."""
_MAX_BODY_BYTES = MAX_RECORD_BYTES - _MAX_REST_BYTES


class _Record(msgspec.Struct, array_like=True, frozen=True):
    """Kept by the backend with the stream. A worker of another version does not read it: PROTOCOL_VERSION differs."""

    linger_s: int
    path: str
    body: bytes
    seed: int
    stream_id: str
    created: int


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Record)


def read_linger(exchange: Exchange, body: Any, data: bytes, max_linger_s: int) -> LingeringAnswer | None:
    """Read the header. data is the body as it was sent. Raises ApiError."""
    value = exchange.header(_HEADER.lower().encode())
    if value is None:
        return None
    if not max_linger_s:
        invalid(_HEADER, "this server keeps no streams: it runs with --max-linger-s 0")
    if not (value.isdigit() and len(value) <= len(str(max_linger_s)) and 1 <= int(value) <= max_linger_s):
        shown = shorten(value.decode("latin-1"))
        invalid(_HEADER, f"must be a number of seconds from 1 to {max_linger_s}, got {shown}")
    if getattr(body, "stream", None) is not True:
        invalid(_HEADER, "only for an answer that is streamed: set stream to true")
    if getattr(body, "background", None) is True:
        invalid(_HEADER, "not for a background response, whose stream can be read again without it")
    if len(data) > _MAX_BODY_BYTES:
        invalid(_HEADER, f"the body has {len(data)} bytes; the limit for a stream that lingers is {_MAX_BODY_BYTES}")
    return LingeringAnswer(int(value), exchange.path, data, secrets.randbits(_SEED_BITS))


def prepare_to_linger(lingering: LingeringAnswer, body: AnsweredBody, served: ServedModel) -> ServedModel:
    """Give the body a seed. Return the model, at the backend that has kept the stream. Raises ApiError for what is not
    the same when the events are written again, or cannot be kept."""
    fields = {"return_timings": body.return_timings, "timings_per_token": body.timings_per_token}
    if isinstance(body, ChatBody):
        fields["return_progress"] = body.return_progress
    for field, value in fields.items():
        if value:
            invalid(field, f"not available with {_HEADER}: times are not repeated")
    if body.num_prompt_logprobs >= 0:
        invalid("echo", f"not available with logprobs and {_HEADER}")
    if body.seed is None:
        body.seed = lingering.seed
    return served if lingering.backend is None else replace(served, backend=lingering.backend)


def linger_terms(lingering: LingeringAnswer, tenant: bytes) -> Linger:
    """Return the terms of the first choice of an answer that has begun."""
    if lingering.begun is None:
        raise RuntimeError("an answer lingers under its id")
    stream_id, created = lingering.begun
    record = _Record(lingering.linger_s, lingering.path, lingering.body, lingering.seed, stream_id, created)
    return Linger(StreamName(tenant, stream_id), lingering.linger_s, 0, _encode(record))


def terms_of_choice(first: Linger | None, choice: int) -> Linger | None:
    """Return the terms of any choice: only the first one carries the record."""
    return first if first is None or choice == 0 else Linger(first.stream, first.linger_s, choice)


def read_record(data: bytes, backend: BackendClient, num_received: int) -> LingeringAnswer:
    """Return the answer that the record describes."""
    record = _decoder.decode(data)
    begun = (record.stream_id, record.created)
    return LingeringAnswer(record.linger_s, record.path, record.body, record.seed, begun, num_received, backend)
