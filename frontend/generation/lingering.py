"""Streams that outlive their connection: which requests may ask for it, and the data with which a worker writes them
again."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec

from penstock.frontend.generation.models.served_model import ModelKeeper, ServedModel
from penstock.frontend.generation.questions import ask
from penstock.frontend.schemas.decoding import AnsweredBody
from penstock.frontend.transport.errors import invalid, shorten
from penstock.frontend.transport.exchange import Exchange, LingeringAnswer
from penstock.shm.client import BackendClient, Linger, StreamName, StreamQuestion, clients_of
from penstock.shm.messages import MAX_RECORD_BYTES

_HEADER = "X-Penstock-Linger"
STREAM_HEADER = b"x-penstock-stream"
_STREAM_NAME = "X-Penstock-Stream"
_STREAM_ID = re.compile(r"(?:chatcmpl-|cmpl-|msg_|resp_)[0-9a-f]{24,40}")
_MAX_EVENT_ID = (1 << 31) - 1
_SEED_BITS = 63
_MAX_REST_BYTES = 1024
"""Size of a record without its body."""
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
    """Read the header. data is the body as the client sent it. Raises ApiError."""
    value, stream = exchange.header(_HEADER.lower().encode()), exchange.header(STREAM_HEADER)
    if value is None:
        if stream is not None:
            invalid(_STREAM_NAME, f"only with {_HEADER}")
        return None
    if not max_linger_s:
        invalid(_HEADER, "this server keeps no streams: it runs with --max-linger-s 0")
    if not (value.isdigit() and len(value) <= len(str(max_linger_s)) and 1 <= int(value) <= max_linger_s):
        shown = shorten(value.decode("latin-1"))
        invalid(_HEADER, f"must be a number of seconds from 1 to {max_linger_s}, got {shown}")
    if not exchange.path.startswith(("/v1/", "/invocations")):
        invalid(_HEADER, f"streams of {exchange.path} cannot linger; those of /v1/chat/completions can")
    if getattr(body, "stream", None) is not True:
        invalid(_HEADER, "only for an answer that is streamed: set stream to true")
    if getattr(body, "background", None) is True:
        invalid(_HEADER, "not for a background response, whose stream can be read again without it")
    if len(data) > _MAX_BODY_BYTES:
        invalid(_HEADER, f"the body has {len(data)} bytes; the limit for a stream that lingers is {_MAX_BODY_BYTES}")
    lingering = LingeringAnswer(int(value), exchange.path, data)
    if stream is not None:
        stream_id = stream.decode("latin-1")
        if not _STREAM_ID.fullmatch(stream_id):
            invalid(_STREAM_NAME, f"must be the id of a stream that has lingered, got {shorten(stream_id)}")
        lingering.begun = (stream_id, int(time.time()))
        lingering.num_received = last_event_id(exchange) + 1
    return lingering


def last_event_id(exchange: Exchange) -> int:
    """Return the number of the last event that the client has received; -1 for none. Raises ApiError."""
    value = exchange.header(b"last-event-id")
    if value is None:
        return -1
    if not (value.isdigit() and len(value) <= len(str(_MAX_EVENT_ID)) and int(value) <= _MAX_EVENT_ID):
        shown = shorten(value.decode("latin-1"))
        invalid("Last-Event-ID", f"must be the id of an event, a number from 0 to {_MAX_EVENT_ID}, got {shown}")
    return int(value)


async def ask_for_stream(
    keepers: Iterable[ModelKeeper], question: StreamQuestion
) -> tuple[BackendClient, bytes] | None:
    """Ask each ready backend for a stream, until one has it; return that one and its record. Raises ApiError."""
    for backend in (backend for keeper in keepers for backend in clients_of(keeper.backend)):
        if backend.ready and (answer := await ask(backend, question)) is not None:
            return backend, answer.record
    return None


async def kept_or_anew(lingering: LingeringAnswer, keepers: Iterable[ModelKeeper], tenant: bytes) -> LingeringAnswer:
    """Return the answer to a request that was sent again: the stream if a backend here has kept it, else lingering.

    In the second case it is computed again under its old id. Raises ApiError for another request's stream.
    """
    if lingering.begun is None:
        return lingering
    stream_id, _ = lingering.begun
    found = await ask_for_stream(keepers, StreamQuestion(StreamName(tenant, stream_id), "read"))
    if found is None:
        return lingering
    backend, record = found
    kept = read_record(record, backend, lingering.num_received)
    if (kept.path, kept.body) != (lingering.path, lingering.body):
        invalid(_STREAM_NAME, f"{shorten(stream_id)} answers another request: path and body must be the same")
    return kept


def prepare_to_linger(lingering: LingeringAnswer, body: AnsweredBody, served: ServedModel) -> ServedModel:
    """Give the body a seed. Return the model, at the backend that has kept the stream.

    Raises ApiError for requests whose events would differ when written again, or cannot be kept.
    """
    for field in ("return_timings", "timings_per_token", "return_progress"):
        if getattr(body, field):
            invalid(field, f"not available with {_HEADER}: times are not repeated")
    if body.num_prompt_logprobs >= 0:
        invalid("echo", f"not available with logprobs and {_HEADER}")
    if lingering.seed is None:
        lingering.seed = _seed_of(lingering)
    if body.seed is None:
        body.seed = lingering.seed
    return served if lingering.backend is None else replace(served, backend=lingering.backend)


def _seed_of(lingering: LingeringAnswer) -> int:
    """A seed that depends only on the answer's id, so that any server that computes it again draws the same tokens."""
    if lingering.begun is None:
        raise RuntimeError("an answer lingers under its id")
    digest = hashlib.blake2b(lingering.begun[0].encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> (64 - _SEED_BITS)


def linger_terms(lingering: LingeringAnswer, tenant: bytes) -> Linger:
    """Return the terms of the first choice of an answer that has begun."""
    if lingering.begun is None or lingering.seed is None:
        raise RuntimeError("an answer lingers under its id, with a seed")
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
    return LingeringAnswer(record.linger_s, record.path, record.body, begun, record.seed, num_received, backend)
