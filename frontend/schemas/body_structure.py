"""Limits how many values a body contains, before it is decoded: a decoder cannot be interrupted."""

from __future__ import annotations

import asyncio
import codecs

from penstock.frontend.transport.errors import ApiError, ErrorKind

SMALL_BODY_BYTES = 64 << 10
"""Bodies up to this size are decoded at once; larger ones are checked first, and decoded in a thread."""
MAX_OBJECTS = 1 << 16
"""Objects and arrays of a body. Decoding this many takes about 15 ms."""
MAX_STRINGS = 1 << 16
"""Strings of a body, including names of fields."""
_SLICE_BYTES = 64 << 10


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
