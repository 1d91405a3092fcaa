"""DeepSeek's markup language from V3.2 on: each part of a call is a tag that begins with the mark ｜DSML｜."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.frontend.parsing.reader import Malformed
from penstock.frontend.parsing.tool_formats.base import (
    ParameterLayout,
    ToolFormat,
    is_function_name,
    read_arguments,
    read_section,
)
from penstock.frontend.parsing.tool_formats.parameters import ParameterReader

if TYPE_CHECKING:
    from penstock.frontend.parsing.parsed_output import ParsedOutput
    from penstock.frontend.parsing.reader import Reader, Reading
    from penstock.frontend.parsing.tool_formats.base import Functions

MARK = "｜DSML｜"
_SECTIONS = ("function_calls", "tool_calls")
_OPENINGS = tuple(f"<{MARK}{section}>" for section in _SECTIONS)
_ENDINGS = tuple(f"</{MARK}{section}>" for section in _SECTIONS)
_CALL, _CALL_END = f'<{MARK}invoke name="', f"</{MARK}invoke>"
_IS_TEXT, _IS_JSON = ' string="true"', ' string="false"'
_LAYOUT = ParameterLayout(
    f'<{MARK}parameter name="', f'"{_IS_TEXT}>', f"</{MARK}parameter>", "\n", json_middle=f'"{_IS_JSON}>'
)
_NAME_CHARACTERS = re.compile(r'[^"<>\n]+')
_TAG_CHARACTERS = re.compile(r"[^<>\n]+")
_PARAMETER = re.compile(r'(?P<key>.+?)"(?: string="(?P<is_text>true|false)")?')
"""The rest of a parameter's tag. A key may have quotes: nothing escapes them."""


class DeepSeekV32(ToolFormat):
    """The section has one name in V3.2 and another in V4, is_fourth; both are read."""

    name = "deepseek_v32"
    markers: tuple[str, ...] = (MARK,)
    separator = ""
    parameters: ParameterLayout | None = _LAYOUT

    def __init__(self, *, is_fourth: bool) -> None:
        self.trigger = _OPENINGS[is_fourth]
        self.opening = f"{self.trigger}\n"
        self.closing = _ENDINGS[is_fourth]

    def around(self, name: str) -> tuple[str, str]:
        return f'{_CALL}{name}">\n', f"{_CALL_END}\n"

    def around_json(self, name: str) -> tuple[str, str]:
        before, after = self.around(name)
        return before, f"\n{after}"

    def read(self, reader: Reader, output: ParsedOutput, functions: Functions) -> Reading[None]:
        while (opening := (yield from reader.until_any((*_OPENINGS, _CALL), output.content))) is not None:
            reader.hold()
            if opening != _CALL:
                yield from reader.accept(opening)
            yield from read_section(reader, output, _CALL, _ENDINGS, lambda: _read_call(reader, output, functions))


def _read_call(reader: Reader, output: ParsedOutput, functions: Functions) -> Reading[None]:
    """Read the name, then the parameters or one JSON object."""
    name = yield from _read_name(reader)
    yield from reader.expect(">")
    if not is_function_name(name):
        raise Malformed
    yield from reader.skip_spaces()
    if (yield from reader.peek()) == "{":
        yield from read_arguments(reader, output, name)
        yield from reader.skip_spaces()
        yield from reader.accept(_CALL_END)
    else:
        reader.release()
        parameters = ParameterReader(output, name, functions.get(name, {}), _LAYOUT)
        while not (yield from reader.accept(_CALL_END)):
            yield from _read_parameter(reader, parameters)
            yield from reader.skip_spaces()
        parameters.end()
    output.end_call()


def _read_parameter(reader: Reader, parameters: ParameterReader) -> Reading[None]:
    yield from reader.expect(_LAYOUT.opening)
    parts: list[str] = []
    yield from reader.run(_TAG_CHARACTERS, parts.append)
    yield from reader.expect(">")
    if (tag := _PARAMETER.fullmatch("".join(parts))) is None:
        raise Malformed
    yield from parameters.read(reader, tag["key"], is_text=tag["is_text"] == "true")


def _read_name(reader: Reader) -> Reading[str]:
    """Read a name and the quote that ends it."""
    parts: list[str] = []
    yield from reader.run(_NAME_CHARACTERS, parts.append)
    yield from reader.expect('"')
    return "".join(parts)
