"""Encoding, and decoding that turns each of the codec's errors into WireError."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import msgspec

from penstock.shm.messages.handshake import Hello, Refusal, Welcome
from penstock.shm.messages.outputs import StepOutputs
from penstock.shm.messages.requests import Cancel, Credit, PoolBatch, Request

ToBackend: TypeAlias = Request | PoolBatch | Cancel | Credit


class WireError(ValueError):
    """Not one of our messages, or one outside its bounds."""


_encoder = msgspec.msgpack.Encoder()
_to_backend: msgspec.msgpack.Decoder[ToBackend] = msgspec.msgpack.Decoder(ToBackend)
_to_frontend = msgspec.msgpack.Decoder(StepOutputs)
_hello = msgspec.msgpack.Decoder(Hello)
_welcome: msgspec.msgpack.Decoder[Welcome | Refusal] = msgspec.msgpack.Decoder(Welcome | Refusal)

encode = _encoder.encode


T = TypeVar("T")


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    # The codec raises these four for hostile bytes; RecursionError for nesting beyond the interpreter's limit.
    try:
        return decoder.decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(str(error)) from None


def decode_to_backend(data: bytes | memoryview) -> ToBackend:
    return _decode(_to_backend, data)


def decode_to_frontend(data: bytes | memoryview) -> StepOutputs:
    """Raises WireError also when the columns differ in length."""
    outputs = _decode(_to_frontend, data)
    events = len(outputs.finishes)
    if len(outputs.request_ids) != 8 * events or len(outputs.token_ids) != 4 * events:
        raise WireError(
            f"StepOutputs columns differ in length: {len(outputs.request_ids)} bytes of request ids and "
            f"{len(outputs.token_ids)} of token ids for {events} events"
        )
    return outputs


def decode_hello(data: bytes | memoryview) -> Hello:
    return _decode(_hello, data)


def decode_welcome(data: bytes | memoryview) -> Welcome | Refusal:
    return _decode(_welcome, data)
