"""<invoke name="f"><key>value</key><list><item>1</item></list></invoke>, a mark before each tag: MiniMax M3."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.frontend.parsing.json_text import read_json
from penstock.frontend.parsing.parsed_output import ParsedOutput
from penstock.frontend.parsing.reader import Malformed, Reader, Reading
from penstock.frontend.parsing.tool_formats.base import Functions, ToolFormat, is_function_name
from penstock.frontend.parsing.tool_formats.parameters import TEXT, as_json, json_string, resolved, types_of

MARK = "]<]minimax[>["
_CALLS, _CALLS_END = f"{MARK}<tool_call>", f"{MARK}</tool_call>"
_CALL, _CALL_END = f'{MARK}<invoke name="', f"{MARK}</invoke>"
_NAME_CHARACTERS = re.compile(r"[^\"<>/\n]+")
_ITEM = "item"
_MAX_DEPTH = 32


class MiniMax(ToolFormat):
    """A call is emitted when it is complete. Its arguments may also be JSON, as in calls that a grammar enforces."""

    name = "minimax"
    markers: tuple[str, ...] = (MARK,)
    triggers = (_CALLS, _CALL)
    trigger: str | None = _CALLS
    opening = f"{_CALLS}\n"
    separator = "\n"
    closing = f"\n{_CALLS_END}"

    def around(self, name: str) -> tuple[str, str]:
        return f'{_CALL}{name}">', _CALL_END

    def read(self, reader: Reader, output: ParsedOutput, functions: Functions) -> Reading[None]:
        while (yield from reader.until_any(self.triggers, output.content)):
            reader.hold()
            try:
                yield from reader.accept(_CALLS)
                yield from reader.skip_spaces()
                yield from reader.expect(_CALL)
                name = yield from _read_name(reader, '">')
                if not is_function_name(name):
                    raise Malformed
                arguments = yield from _read_arguments(reader, functions.get(name, {}))
                output.begin_call(name)
                output.arguments(arguments)
                output.end_call()
                reader.hold()
                yield from reader.skip_spaces()
                if (yield from reader.accept(_CALLS_END)):
                    reader.hold()
            except Malformed:
                pass
            output.give_back(reader.release())


def _read_name(reader: Reader, closing: str) -> Reading[str]:
    parts: list[str] = []
    yield from reader.run(_NAME_CHARACTERS, parts.append)
    yield from reader.expect(closing)
    return "".join(parts)


def _read_arguments(reader: Reader, schema: Mapping[str, Any]) -> Reading[str]:
    """Read arguments and the end of the call; return them as JSON."""
    yield from reader.skip_spaces()
    if (yield from reader.peek()) != "{":
        return _object((yield from _read_members(reader, _CALL_END, schema, schema, 0)))
    parts: list[str] = []
    yield from read_json(reader, parts.append)
    yield from reader.expect(_CALL_END)
    return "".join(parts)


def _read_members(
    reader: Reader, closing: str, schema: object, root: Mapping[str, Any], depth: int
) -> Reading[list[tuple[str, str]]]:
    """Read tagged values up to the closing tag; return their names, and their values as JSON."""
    members: list[tuple[str, str]] = []
    while not (yield from reader.accept(closing)):
        yield from reader.expect(f"{MARK}<")
        key = yield from _read_name(reader, ">")
        members.append((key, (yield from _read_value(reader, key, _member(schema, key, root), root, depth + 1))))
        yield from reader.skip_spaces()
    return members


def _read_value(reader: Reader, key: str, schema: object, root: Mapping[str, Any], depth: int) -> Reading[str]:
    closing, types = f"{MARK}</{key}>", types_of(schema, root)
    parts: list[str] = []
    yield from reader.until(MARK, parts.append)
    if types == TEXT or "".join(parts).strip():
        yield from reader.until(closing, parts.append, keeps_partial=False)
        yield from reader.expect(closing)
        return json_string("".join(parts)) if types == TEXT else as_json("".join(parts), types)
    if depth > _MAX_DEPTH:
        raise Malformed
    members = yield from _read_members(reader, closing, schema, root, depth)
    is_list = all(name == _ITEM for name, _ in members) if members else "array" in types and "object" not in types
    return f"[{', '.join(value for _, value in members)}]" if is_list else _object(members)


def _member(schema: object, key: str, root: Mapping[str, Any]) -> object:
    """Return the schema of an object's member or a list's item; None if there is none."""
    schema = resolved(schema, root)
    if not isinstance(schema, dict):
        return None
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, dict) else schema.get("items") if key == _ITEM else None


def _object(members: list[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{json_string(key)}: {value}" for key, value in members) + "}"
