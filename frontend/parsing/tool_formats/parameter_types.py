"""The types of parameters whose values are written as plain text, from the function's JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.frontend.parsing.reader import SPACES

Types = frozenset[str]
"""Names of JSON types. An integer is a number."""

TEXT: Types = frozenset({"string"})
ANY: Types = frozenset({"string", "number", "boolean", "null", "array", "object"})
_TYPE_NAMES = {
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
_MAX_REFERENCES = 16
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Templates that write a value with `| string` show these words to the model."""


def parameter_types(schema: Mapping[str, Any], key: str) -> Types:
    """Return the types that a function's parameter may have; all of them if the schema does not say."""
    properties = schema.get("properties")
    return types_of(properties.get(key) if isinstance(properties, dict) else None, schema)


def types_of(schema: object, root: Mapping[str, Any]) -> Types:
    """Return the types of the values that a schema allows. root is the schema that its references point into."""
    types: set[str] = set()
    for alternative in _alternatives(schema, root):
        types |= _own_types(alternative)
    return frozenset(types)


def _alternatives(schema: object, root: Mapping[str, Any]) -> list[object]:
    """Return the alternatives that a value may match, with their references followed. Each is listed once."""
    found: list[object] = []
    seen: set[int] = set()
    pending = [schema]
    while pending:
        schema = resolved(pending.pop(), root)
        if id(schema) in seen:  # references may form circles
            continue
        seen.add(id(schema))
        branches = None
        if isinstance(schema, dict) and "type" not in schema:
            single = schema.get("allOf")
            is_single = isinstance(single, list) and len(single) == 1
            branches = single if is_single else schema.get("anyOf", schema.get("oneOf"))
        if isinstance(branches, list):
            pending += branches
        else:
            found.append(schema)
    return found


def _own_types(schema: object) -> Types:
    if not isinstance(schema, dict):
        return ANY
    declared = schema.get("type")
    if declared is not None:
        names = declared if isinstance(declared, list) else [declared]
        return frozenset("number" if name == "integer" else name for name in names if isinstance(name, str)) & ANY
    if isinstance(values := schema.get("enum"), list):
        return frozenset(_TYPE_NAMES[type(value)] for value in values)
    return frozenset([_TYPE_NAMES[type(schema["const"])]]) if "const" in schema else ANY


def resolved(schema: object, root: Mapping[str, Any]) -> object:
    """Follow references within root. Return None for a reference without a target."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
            return schema
        schema = _pointed(reference, root)
    return None


def _pointed(reference: str, root: Mapping[str, Any]) -> object:
    path, *parts = reference.split("/")
    target: object = root if path == "#" else None
    for part in parts:
        key = part.replace("~1", "/").replace("~0", "~")
        target = target.get(key) if isinstance(target, Mapping) else None
    return target


def as_json(text: str, types: Types) -> str:
    """Return a parameter's text as JSON: the value that it spells, if that has one of the types; else a string."""
    spelled = text.strip(SPACES)
    spelled = _PYTHON_WORDS.get(spelled, spelled)
    try:
        value = msgspec.json.decode(spelled)
    except (msgspec.DecodeError, RecursionError):
        return json_string(text)
    is_value = not isinstance(value, str) and _TYPE_NAMES[type(value)] in types
    return spelled if is_value else json_string(text)


def json_string(text: str) -> str:
    return msgspec.json.encode(text).decode()
