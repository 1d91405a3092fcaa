"""<tool_call>{"name": …, "arguments": {…}}</tool_call>: Hermes, Qwen 2.5, Qwen 3 and others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.frontend.parsing.tool_formats.base import ToolFormat, is_function_name, read_json_call

if TYPE_CHECKING:
    from penstock.frontend.parsing.parsed_output import ParsedOutput
    from penstock.frontend.parsing.reader import Reader, Reading
    from penstock.frontend.parsing.tool_formats.base import Functions

_OPENING = "<tool_call>"
_CLOSING = "</tool_call>"


class Hermes(ToolFormat):
    name = "hermes"
    markers: tuple[str, ...] = (_OPENING, _CLOSING)
    trigger: str | None = _OPENING
    opening = ""
    separator = "\n"
    closing = ""

    def around(self, name: str) -> tuple[str, str]:
        before = f'{{"name": {msgspec.json.encode(name).decode()}, "arguments": '
        return f"{_OPENING}\n{before}", f"}}\n{_CLOSING}"

    def read(self, reader: Reader, output: ParsedOutput, _functions: Functions) -> Reading[None]:
        while (yield from reader.until(_OPENING, output.content)):
            reader.hold()
            yield from reader.accept(_OPENING)
            yield from read_tagged_json(reader, output)


def read_tagged_json(reader: Reader, output: ParsedOutput) -> Reading[None]:
    """Read a call as JSON and its closing tag. The reader holds the opening tag."""
    if (yield from read_json_call(reader, output, is_function_name)):
        yield from reader.skip_spaces()
        yield from reader.accept(_CLOSING)
