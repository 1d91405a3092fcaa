"""Reads arguments that a model writes one by one, as tagged text, and emits them as a JSON object while they arrive.

Their types are those of the function's JSON schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.frontend.parsing.reader import SPACES

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.frontend.parsing.parsed_output import ParsedOutput
    from penstock.frontend.parsing.reader import Reader, Reading
    from penstock.frontend.parsing.tool_formats.base import ParameterLayout


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


class ParameterReader:
    """Reads the parameters of one call. A text streams; any other value is emitted when it is complete."""

    def __init__(self, output: ParsedOutput, name: str, schema: Mapping[str, Any], layout: ParameterLayout) -> None:
        """Begin the call. schema describes its arguments; an empty one allows everything."""
        self._emit = output.arguments
        self._schema = schema
        self._layout = layout
        self._before_key = "{"
        output.begin_call(name)

    def read(self, reader: Reader, key: str, *, is_text: bool = False) -> Reading[None]:
        """Read a value and its closing mark. Raises Malformed if the text ends before that.

        is_text: the model marks the value as a text. It is one if the schema allows a text.
        """
        layout = self._layout
        types = parameter_types(self._schema, key)
        if is_text and types >= TEXT:
            types = TEXT
        name = f"{self._before_key}{json_string(key)}: "
        self._before_key = ", "
        parts: list[str] = []
        if types == TEXT:
            self._emit(f'{name}"')
        emit: Callable[[str], object] = self._emit_text if types == TEXT else parts.append
        if layout.is_indented:
            yield from reader.accept("\n")
            emit = _without_last_line_break(emit)
        yield from reader.until(layout.closing, emit, keeps_partial=False)
        yield from reader.expect(layout.closing)
        self._emit('"' if types == TEXT else name + as_json("".join(parts), types))

    def end(self) -> None:
        """End the object: the call is complete."""
        self._emit("{}" if self._before_key == "{" else "}")

    def _emit_text(self, text: str) -> None:
        self._emit(json_string(text)[1:-1])


def _without_last_line_break(emit: Callable[[str], object]) -> Callable[[str], object]:
    """Return an emitter of a text in pieces. It drops a line break at the text's end."""
    held = ""

    def emit_rest(piece: str) -> None:
        nonlocal held
        text = held + piece
        held = "\n" if text.endswith("\n") else ""
        if rest := text.removesuffix("\n"):
            emit(rest)

    return emit_rest
