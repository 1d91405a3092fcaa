"""Finds fields of a body that its type does not have."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from penstock.frontend.schemas.decoding import decode_without_gc
from penstock.frontend.transport.errors import ApiError, ErrorKind, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("penstock.bodies")

_MAX_LISTED = 16
_plain = msgspec.json.Decoder()
_NOTHING: tuple[object, ...] = (None, False, "", [], {})
"""Values that ask for nothing."""


def check_unknown_fields(data: bytes, body_type: type[Struct], request_id: str, *, refuses: bool) -> None:
    """Refuse or log unknown fields whose values ask for something.

    Raises ApiError for the first one if refuses; otherwise writes a debug line. Either costs a second decoding. A body
    that cannot be decoded is ignored here.
    """
    if not refuses and not logger.isEnabledFor(logging.DEBUG):
        return
    try:
        body, plain = decode_without_gc(_decoder(body_type), data), decode_without_gc(_plain, data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    unknown = [shorten(path)[1:-1] for path, _ in zip(_unknown("", body, plain), range(_MAX_LISTED), strict=False)]
    if unknown and refuses:
        message = f"{unknown[0]}: unknown field; this server was started with --strict"
        raise ApiError(ErrorKind.UNSUPPORTED_FIELD, message, param=unknown[0])
    if unknown:
        logger.debug("%s has unknown fields, which are ignored: %s", request_id, ", ".join(unknown))


def _unknown(path: str, decoded: object, plain: Any) -> Iterator[str]:
    """Yield the paths of values in plain that decoded, which was made from it, does not have."""
    if isinstance(decoded, Struct) and isinstance(plain, dict):
        fields = _fields(type(decoded))
        for name, value in plain.items():
            inner = f"{path}.{name}" if path else name
            if name in fields:
                yield from _unknown(inner, getattr(decoded, name), value)
            elif value not in _NOTHING:
                yield inner
    elif isinstance(decoded, list) and isinstance(plain, list) and decoded and isinstance(decoded[0], Struct):
        # Lists of other types cannot contain unknown fields; they may be long, such as a prompt of token ids.
        for index, (item, value) in enumerate(zip(decoded, plain, strict=True)):
            yield from _unknown(f"{path}[{index}]", item, value)


@cache
def _decoder(body_type: type[Struct]) -> msgspec.json.Decoder[Struct]:
    return msgspec.json.Decoder(body_type)


@cache
def _fields(struct: type[Struct]) -> frozenset[str]:
    """Return the field names in JSON, with the tag field of a union's member."""
    tag = struct.__struct_config__.tag_field
    return frozenset((*struct.__struct_encode_fields__, *(() if tag is None else (tag,))))
