"""Reads arguments that a model writes one by one, as tagged text, and emits them as a JSON object while they arrive.

Their types are those of the function's JSON schema.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock.frontend.parsing.json_text import repaired_json
from penstock.frontend.parsing.parsed_output import ParsedOutput
from penstock.frontend.parsing.reader import SPACES, Malformed, Reader, Reading
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
_CDATA, _CDATA_END = "<![CDATA[", "]]>"
"""MiniCPM encloses texts with special characters."""
_LETTERS = re.compile(r"[a-z]+")


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
    """Return a parameter's text as JSON: the value that it spells, if that has one of the types; else a string.

    Templates that write a value with `| string` show Python's spelling to the model.
    """
    spelled = text.strip(SPACES)
    repaired = repaired_json(spelled)
    if repaired is None or repaired[1] != len(spelled):
        return json_string(text)
    try:
        value = msgspec.json.decode(repaired[0])
    except (msgspec.DecodeError, RecursionError):
        return json_string(text)
    is_value = not isinstance(value, str) and _TYPE_NAMES[type(value)] in types
    return repaired[0] if is_value else json_string(text)


def common_prefix(first: str, second: str) -> str:
    """Return the text that both begin with."""
    differ = (place for place, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return first[: next(differ, min(len(first), len(second)))]


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
        self._attribute, self._rest = _split_middle(layout)
        output.begin_call(name)

    def read(self, reader: Reader) -> Reading[None]:
        """Read the rest of a parameter, from its key on. Raises Malformed if the text ends before that."""
        layout = self._layout
        key, is_text = yield from self._read_key(reader)
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
        if layout.closing.startswith("<") and (yield from reader.accept(_CDATA)):
            yield from reader.until(_CDATA_END, emit, keeps_partial=False)
            yield from reader.expect(_CDATA_END)
        yield from reader.until(layout.closing, emit, keeps_partial=False)
        yield from reader.expect(layout.closing)
        self._emit('"' if types == TEXT else name + as_json("".join(parts), types))

    def _read_key(self, reader: Reader) -> Reading[tuple[str, bool]]:
        """Read a key and the marks up to its value. Return also whether they mark the value as a text."""
        parts: list[str] = []
        before, after = self._attribute
        mark = yield from reader.until_any(tuple(filter(None, (before, after))), parts.append)
        yield from reader.accept(mark or "")
        kind: list[str] = []
        if before and mark == before:
            yield from reader.run(_LETTERS, kind.append)
            yield from reader.expect(after)
        for piece in self._rest:
            yield from reader.skip_spaces()
            yield from reader.expect(piece)
        if mark is None or "\n" in (key := "".join(parts)):
            raise Malformed
        return key, bool(before) and "".join(kind) == self._layout.middle.removeprefix(before).removesuffix(after)

    def end(self) -> None:
        """End the object: the call is complete."""
        self._emit("{}" if self._before_key == "{" else "}")

    def _emit_text(self, text: str) -> None:
        self._emit(json_string(text)[1:-1])


def _split_middle(layout: ParameterLayout) -> tuple[tuple[str, str], tuple[str, ...]]:
    """Return the texts around an attribute that says whether a value is a text, and the marks behind a key.

    Without such an attribute, its first text is empty, and its second is the first mark.
    """
    middle, other = layout.middle, layout.json_middle
    if not other:
        first, *rest = middle.split()
        return ("", first), tuple(rest)
    before = common_prefix(middle, other)
    after = common_prefix(middle[::-1], other[::-1])[::-1]
    return (before[: before.rfind('"') + 1], after[after.find('"') :]), ()


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
