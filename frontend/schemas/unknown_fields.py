"""Finds fields of a body that its type does not have, without decoding what they contain."""

from __future__ import annotations

import asyncio
import difflib
from collections import ChainMap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeAlias

import msgspec
from msgspec import Raw, Struct, inspect

from penstock.frontend.schemas.decoding import asks_for_nothing, decode_without_gc
from penstock.frontend.transport.errors import shorten

_MAX_FOUND = 16
_PAUSE_EVERY = 1024
"""Fields looked at before the event loop gets a turn: about 1 ms."""
_SIMILAR = 0.75
_MAX_COMPARED_CHARACTERS = 64
_OTHER_NAMES = {
    "extra_key": "cache_salt",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_cmpl": "n",
    "n_predict": "max_tokens",
    "n_probs": "top_logprobs",
    "no_stop_trim": "include_stop_str_in_output",
    "reasoning_budget": "thinking_budget",
    "return_tokens": "return_token_ids",
    "t_max_predict_ms": "timeout_ms",
}
"""Fields of llama.cpp and SGLang, and ours with the nearest meaning."""
_members = msgspec.json.Decoder(dict[str, Raw])
_items = msgspec.json.Decoder(list[Raw])


@dataclass(frozen=True, slots=True)
class _ObjectShape:
    """The fields of an object, with the shapes of those that contain objects with known fields."""

    fields: Mapping[str, _Shape | None]


@dataclass(frozen=True, slots=True)
class _ListShape:
    item: _Shape


_Shape: TypeAlias = _ObjectShape | _ListShape


@dataclass(frozen=True, slots=True)
class UnknownField:
    """Names are written as in a JSON string without quotes: no control characters."""

    path: str
    """Such as messages[3].weight."""
    name: str
    """The last name of the path. It may contain dots."""
    nearest: str | None
    """The known field beside it with the same purpose or the most similar name."""


async def find_unknown_fields(data: bytes, body_type: type[Struct]) -> list[UnknownField]:
    """Return the unknown fields whose values ask for something: the first 16 with different names.

    data must have been decoded as body_type before: that checked it, and bounded its lists.
    """
    found: dict[str, UnknownField] = {}
    for position, unknown in enumerate(_walk("", Raw(data.strip()), _shape(body_type))):
        if unknown is not None and unknown.name not in found:
            # Comparing names takes almost 1 ms: only once for each.
            found[unknown.name] = UnknownField(unknown.path, unknown.name, _nearest(unknown.name, unknown.known))
            if len(found) == _MAX_FOUND:
                break
            await asyncio.sleep(0)
        elif position % _PAUSE_EVERY == _PAUSE_EVERY - 1:
            await asyncio.sleep(0)
    return list(found.values())


class _Unknown(NamedTuple):
    path: str
    name: str
    known: Mapping[str, object]
    """The fields that its object has."""


def _walk(path: str, raw: Raw, shape: _Shape) -> Iterator[_Unknown | None]:
    """Yield once for each field of a value: an unknown field, or None for a known one."""
    first = bytes(memoryview(raw)[:1])
    if isinstance(shape, _ListShape):
        if first == b"[":
            items: list[Raw] = decode_without_gc(_items, raw)
            for index, item in enumerate(items):
                yield from _walk(f"{path}[{index}]", item, shape.item)
        return
    if first != b"{":
        return
    for name, value in decode_without_gc(_members, raw).items():
        if name in shape.fields:
            inner = shape.fields[name]
            if inner is not None:
                yield from _walk(f"{path}.{name}" if path else name, value, inner)
        elif not asks_for_nothing(value):
            shown = shorten(name)[1:-1]
            yield _Unknown(f"{path}.{shown}" if path else shown, shown, shape.fields)
            continue
        yield None


def _nearest(name: str, known: Mapping[str, object]) -> str | None:
    if (ours := _OTHER_NAMES.get(name)) in known:
        return ours
    matches = difflib.get_close_matches(name[:_MAX_COMPARED_CHARACTERS], known, 1, _SIMILAR)
    return matches[0] if matches else None


@cache
def _shape(body_type: type[Struct]) -> _Shape:
    return _shape_of(inspect.type_info(body_type)) or _ObjectShape({})


def _shape_of(kind: inspect.Type) -> _Shape | None:
    """Return None for a type that contains no object with known fields."""
    match kind:
        case inspect.StructType():
            fields = {field.encode_name: _shape_of(field.type) for field in kind.fields}
            return _ObjectShape(fields if kind.tag_field is None else {kind.tag_field: None, **fields})
        case inspect.ListType():
            item = _shape_of(kind.item_type)
            return None if item is None else _ListShape(item)
        case inspect.UnionType():
            # A list or one object; or several objects, told apart by a tag.
            shapes = [shape for member in kind.types if (shape := _shape_of(member)) is not None]
            objects = [shape.fields for shape in shapes if isinstance(shape, _ObjectShape)]
            if len(objects) > 1:
                return _ObjectShape(dict(ChainMap(*map(dict, objects))))
            return shapes[0] if shapes else None
    return None
