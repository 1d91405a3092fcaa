"""Decodes a body from bytes, or raises an error that names the field, its value and the limit.

The number of values in a body is limited before that: a decoder cannot be interrupted.
"""

from __future__ import annotations

import asyncio
import codecs
import gc
import re
from functools import cache
from typing import TypeAlias, TypeVar

import msgspec
from msgspec import Raw, Struct

from penstock.frontend.schemas.chat import ChatBody, check_chat
from penstock.frontend.schemas.completion import (
    UNSUPPORTED_INFILL,
    UNSUPPORTED_NATIVE,
    CompletionBody,
    InfillBody,
    NativeBody,
    NativeCompletionBody,
    check_completion,
)
from penstock.frontend.schemas.generation import GenerationBody
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, shorten

SMALL_BODY_BYTES = 64 << 10
"""Bodies up to this size are decoded at once; larger ones are checked first, and decoded in a thread."""
MAX_OBJECTS = 1 << 16
"""Objects and arrays of a body. Decoding this many takes about 15 ms."""
MAX_STRINGS = 1 << 16
"""Strings of a body, including names of fields."""
_SLICE_BYTES = 64 << 10
_LONE_SURROGATE = re.compile(rb"(?<!\\)(\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u)")
"""Near the body's end the decoder says that the body was truncated."""


async def check_structure(data: bytes) -> None:
    """Raises ApiError if it is not UTF-8, or if there are too many values.

    Numbers are not limited: a prompt may be a million token ids. The loop gets a turn after each slice of a body that
    must be read exactly.
    """
    if not data.isascii():
        await _check_utf_8(data)
    if len(data) <= SMALL_BODY_BYTES:
        return
    if data.count(b"{") + data.count(b"[") <= MAX_OBJECTS and data.count(b'"') <= 2 * MAX_STRINGS:
        return  # including any within strings
    # Without escapes, quotes are only at the ends of strings.
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_objects = num_quotes = 0
    for start in range(0, len(plain), _SLICE_BYTES):
        await asyncio.sleep(0)
        parts = plain[start : start + _SLICE_BYTES].split(b'"')
        outside = b"".join(parts[num_quotes % 2 :: 2])
        num_objects += outside.count(b"{") + outside.count(b"[")
        num_quotes += len(parts) - 1
        if num_objects > MAX_OBJECTS:
            raise _too_many("objects and arrays", MAX_OBJECTS)
        if num_quotes > 2 * MAX_STRINGS:
            raise _too_many("strings, names of fields included", MAX_STRINGS)


async def _check_utf_8(data: bytes) -> None:
    """Check what decoders skip, such as names of unknown fields: reading those later would fail."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(data), _SLICE_BYTES):
        if start:
            await asyncio.sleep(0)
        end = start + _SLICE_BYTES
        num_kept = len(decoder.getstate()[0])
        try:
            decoder.decode(data[start:end], final=end >= len(data))
        except UnicodeDecodeError as error:
            message = f"the body is not JSON: byte {start - num_kept + error.start} is not UTF-8"
            raise ApiError(ErrorKind.INVALID_JSON, message) from None


def _too_many(what: str, limit: int) -> ApiError:
    return ApiError(ErrorKind.INVALID_VALUE, f"the body has more than {limit} {what}, the limit")


_ASKS_FOR_NOTHING = frozenset({b"", b"null", b"false", b"[]", b"{}", b'""'})
_DEFAULTS: dict[str, frozenset[object]] = {
    "best_of": frozenset({1}),
    "embed_dtype": frozenset({"float32"}),
    "endianness": frozenset({"native", "little"}),
    "function_call": frozenset({"none"}),
    "mirostat": frozenset({0}),
    "padding": frozenset({"do_not_pad"}),
    "modalities": frozenset({"text"}),
}
"""Values of unsupported fields that ask for the default behavior."""

_MAX_NOTHING_BYTES = 64

_completion = msgspec.json.Decoder(CompletionBody)
_chat = msgspec.json.Decoder(ChatBody)
_native_completion = msgspec.json.Decoder(NativeCompletionBody)
_infill = msgspec.json.Decoder(InfillBody)
_any = msgspec.json.Decoder()
_type_info = cache(msgspec.inspect.type_info)

AnsweredBody: TypeAlias = ChatBody | CompletionBody
"""A body that is answered. Bodies of Responses and Messages are translated to a ChatBody first."""

Body = TypeVar("Body", bound=Struct)
Native = TypeVar("Native", bound=NativeBody)
_Decoded = TypeVar("_Decoded")
_SMALL_BODY_BYTES = 64 << 10


def decode_completion(data: bytes) -> CompletionBody:
    """Raises ApiError naming the field, its value and the limit."""
    body = decode_body(_completion, data)
    check_stream_options(body)
    check_completion(body)
    return body


def decode_chat(data: bytes) -> ChatBody:
    """Raises ApiError naming the field, its value and the limit."""
    body = decode_body(_chat, data)
    check_stream_options(body)
    check_chat(body)
    return body


def decode_native_completion(data: bytes) -> NativeCompletionBody:
    """Raises ApiError naming the field, its value and the limit."""
    body = _checked_native(decode_body(_native_completion, data), UNSUPPORTED_NATIVE)
    body.prompts()
    return body


def decode_infill(data: bytes) -> InfillBody:
    """Raises ApiError naming the field, its value and the limit."""
    return _checked_native(decode_body(_infill, data), UNSUPPORTED_INFILL)


def _checked_native(body: Native, unsupported: tuple[str, ...]) -> Native:
    for field in unsupported:
        if getattr(body, field) is not None:
            message = f"{field}: not supported by this endpoint"
            raise ApiError(ErrorKind.UNSUPPORTED_FIELD, message, param=field)
    return body


def decode_body(decoder: msgspec.json.Decoder[Body], data: bytes) -> Body:
    """Raises ApiError naming the field, its value and the limit; also for a declared field that is not supported."""
    # The codec raises these four errors for hostile bytes.
    try:
        body = decode_without_gc(decoder, data)
    except msgspec.ValidationError as error:
        raise _explain(str(error), data, decoder.type) from None
    except msgspec.DecodeError as error:
        reason = "a string has half of a surrogate pair" if _LONE_SURROGATE.search(data) else error
        raise ApiError(ErrorKind.INVALID_JSON, f"the body is not JSON: {reason}") from None
    except UnicodeDecodeError:
        raise ApiError(ErrorKind.INVALID_JSON, "the body is not valid UTF-8") from None
    except RecursionError:
        raise ApiError(ErrorKind.INVALID_JSON, "the body is nested too deeply") from None
    _refuse_unsupported("", body)
    if isinstance(body, GenerationBody) and body.structured_outputs is not None:
        _refuse_unsupported("structured_outputs.", body.structured_outputs)
    return body


def asks_for_nothing(raw: Raw) -> bool:
    """Whether a value is absent, null, false or empty."""
    if len(memoryview(raw)) > _MAX_NOTHING_BYTES:
        return False
    value = bytes(raw)
    return (value.translate(None, b" \t\r\n") if value[:1] in (b"[", b"{") else value) in _ASKS_FOR_NOTHING


def decode_without_gc(decoder: msgspec.json.Decoder[_Decoded], data: bytes | Raw) -> _Decoded:
    """Decode with the garbage collector off: it would scan a large body again and again, and JSON has no cycles."""
    if len(memoryview(data)) <= _SMALL_BODY_BYTES or not gc.isenabled():
        return decoder.decode(data)
    gc.disable()
    try:
        return decoder.decode(data)
    finally:
        gc.enable()


def check_stream_options(body: GenerationBody) -> None:
    """Raises ApiError."""
    if body.stream_options is not None and not body.stream:
        invalid("stream_options", "only allowed when stream is true")


def _refuse_unsupported(prefix: str, struct: Struct) -> None:
    for field in _raw_fields(type(struct)):
        raw: Raw = getattr(struct, field)
        if asks_for_nothing(raw) or _is_default(field, bytes(raw)):
            continue
        path = prefix + field
        message = f"{path}: not supported by this server"
        raise ApiError(ErrorKind.UNSUPPORTED_FIELD, message, param=path)


@cache
def _raw_fields(struct: type[Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in msgspec.structs.fields(struct) if field.type is Raw)


def _is_default(field: str, raw: bytes) -> bool:
    defaults = _DEFAULTS.get(field)
    if defaults is None or len(raw) > 64:
        return False
    value = _any.decode(raw)
    if isinstance(value, dict) and len(value) == 1:
        value = next(iter(value.items()))
    elif isinstance(value, list) and len(value) == 1:
        value = value[0]
    return isinstance(value, str | int | float | tuple) and _is_flat(value) and value in defaults


def _is_flat(value: str | float | tuple[object, ...]) -> bool:
    return not isinstance(value, tuple) or all(isinstance(item, str) for item in value)


def _explain(message: str, data: bytes, body_type: type[Struct]) -> ApiError:
    """Turn a message of the codec, such as "Expected `int` <= 16 - at `$.n`", into an error that names the value
    too."""
    expected, _, place = message.replace("`", "").rpartition(" - at ")
    expected, place = (expected, place) if expected else (place, "$")
    if expected.startswith("Object missing required field "):
        field = expected.rpartition(" ")[2]
        path = f"{place[2:]}.{field}" if place != "$" else field
        return ApiError(ErrorKind.MISSING_FIELD, f"{path}: required", param=path)
    is_key = place.startswith("key in ")
    path = place.removeprefix("key in ").removeprefix("$").removeprefix(".")
    expected = f"{expected[:1].lower()}{expected[1:]}"
    if expected.startswith("invalid "):  # not one of a fixed set of values, which the codec does not list
        allowed = _choices(_type_info(body_type), _steps(path))
        expected = f"must be one of {', '.join(sorted(allowed))}" if allowed else expected
    if not path:
        return ApiError(ErrorKind.INVALID_VALUE, f"the body must be a JSON object: {expected}")
    if is_key:
        expected = f"a key is wrong: {expected}"
    elif (value := _value_at(path, data)) is not None and not expected.endswith(f", got {value}"):
        expected = f"{expected}, got {value}" if ", got " not in expected else f"{expected} {value}"
    kind = ErrorKind.EMPTY_VALUE if "of length >= 1, got" in expected else ErrorKind.INVALID_VALUE
    return ApiError(kind, f"{path}: {expected}", param=path)


def _choices(kind: msgspec.inspect.Type, steps: list[str]) -> list[str]:
    """Return the values that a type allows at a path within it; empty if they are not a fixed set."""
    match kind:
        case msgspec.inspect.UnionType(types):
            return [choice for member in types for choice in _choices(member, steps)]
        case msgspec.inspect.LiteralType(values) if not steps:
            return [str(value) for value in values]
        case msgspec.inspect.StructType() if steps:
            inner = [_choices(field.type, steps[1:]) for field in kind.fields if field.encode_name == steps[0]]
            return inner[0] if inner else [str(kind.tag)] if steps == [kind.tag_field] else []
        case msgspec.inspect.ListType() if steps:
            return _choices(kind.item_type, steps[1:])
    return []


def _steps(path: str) -> list[str]:
    """Split messages[0].role into messages, [0], role."""
    return path.replace("[", ".[").split(".")


def _value_at(path: str, data: bytes) -> str | None:
    """Return the value at a path such as messages[0].role, shortened; None if it cannot be found."""
    try:
        value = decode_without_gc(_any, data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    for step in _steps(path):
        if step.startswith("["):
            index = step[1:-1]
            if not index.isdecimal() or not isinstance(value, list) or int(index) >= len(value):
                return None
            value = value[int(index)]
        elif isinstance(value, dict) and step in value:
            value = value[step]
        else:
            return None
    return shorten(value)
