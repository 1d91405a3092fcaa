"""Finds a `$ref` of a JSON schema that leads to nothing but itself. No text matches such a schema."""

from __future__ import annotations

from typing import Any

import msgspec

_REF = "$ref"


def circular_reference(schema: str) -> str | None:
    """Return a sentence that names the place; None if there is none. The schema is valid JSON."""
    if f'"{_REF}"' not in schema:
        return None
    whole = msgspec.json.decode(schema)
    known_to_end: set[int] = set()
    places: list[tuple[str, Any]] = [("#", whole)]
    while places:
        place, node = places.pop()
        way: dict[int, str] = {}
        current: Any = node
        while isinstance(current, dict) and id(current) not in known_to_end and isinstance(current.get(_REF), str):
            if id(current) in way:
                return f"the {_REF} at {place} goes round in a circle: {' → '.join(way.values())}"
            way[id(current)] = current[_REF]
            current = _at(whole, current[_REF])
        known_to_end.update(way)
        children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        places += [(f"{place}/{key}", child) for key, child in children]
    return None


def _at(whole: Any, reference: str) -> Any:
    """Return the value that a reference within the schema points to."""
    start, *keys = reference.split("/")
    node = whole if start == "#" else None
    for key in keys:
        name = key.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            node = node[int(name)] if name.isdecimal() and int(name) < len(node) else None
        else:
            node = node.get(name) if isinstance(node, dict) else None
    return node
