"""<tool_call><function=name><parameter=key>value</parameter></function></tool_call>: Qwen3-Coder, Qwen3-Next and Qwen
3.5."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.frontend.parsing.reader import Malformed
from penstock.frontend.parsing.tool_formats.base import ParameterLayout, ToolFormat, is_function_name
from penstock.frontend.parsing.tool_formats.hermes import Hermes, read_tagged_json
from penstock.frontend.parsing.tool_formats.parameters import ParameterReader

if TYPE_CHECKING:
    from penstock.frontend.parsing.parsed_output import ParsedOutput
    from penstock.frontend.parsing.reader import Reader, Reading
    from penstock.frontend.parsing.tool_formats.base import Functions

_OPENING = "<tool_call>"
_CLOSING = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_CLOSING = "</function>"
_LAYOUT = ParameterLayout("<parameter=", ">\n", "</parameter>", "\n", is_indented=True)
_NAME_CHARACTERS = re.compile(r"[^<>\n]+")


class Qwen3Coder(ToolFormat):
    """These models often leave out <tool_call>."""

    name = "qwen3_coder"
    markers: tuple[str, ...] = (_OPENING, _CLOSING)
    trigger: str | None = _OPENING
    opening = ""
    separator = "\n"
    closing = ""
    parameters: ParameterLayout | None = _LAYOUT

    def around(self, name: str) -> tuple[str, str]:
        return f"{_OPENING}\n{_FUNCTION}{name}>\n", f"{_FUNCTION_CLOSING}\n{_CLOSING}"

    def around_json(self, name: str) -> tuple[str, str]:
        return Hermes().around(name)

    def read(self, reader: Reader, output: ParsedOutput, functions: Functions) -> Reading[None]:
        while (yield from reader.until_any((_OPENING, _FUNCTION), output.content)):
            reader.hold()
            yield from reader.accept(_OPENING)
            yield from reader.skip_spaces()
            if (yield from reader.peek()) == "{":
                yield from read_tagged_json(reader, output)
            else:
                yield from _read_call(reader, output, functions)


def _read_call(reader: Reader, output: ParsedOutput, functions: Functions) -> Reading[None]:
    try:
        name = yield from _read_tag(reader, _FUNCTION)
        if not is_function_name(name):
            raise Malformed
        reader.release()
        parameters = ParameterReader(output, name, functions.get(name, {}), _LAYOUT)
        while not (yield from _read_end(reader)):
            yield from parameters.read(reader, (yield from _read_tag(reader, _LAYOUT.opening)))
        parameters.end()
        output.end_call()
    except Malformed:
        output.content(reader.release())


def _read_tag(reader: Reader, opening: str) -> Reading[str]:
    """Read <tag=name> and return the name."""
    yield from reader.expect(opening)
    parts: list[str] = []
    yield from reader.run(_NAME_CHARACTERS, parts.append)
    yield from reader.expect(">")
    return "".join(parts)


def _read_end(reader: Reader) -> Reading[bool]:
    """Read the closing tags of a call if they come next; one of them is enough."""
    yield from reader.skip_spaces()
    has_ended = yield from reader.accept(_FUNCTION_CLOSING)
    if has_ended:
        yield from reader.skip_spaces()
    return (yield from reader.accept(_CLOSING)) or has_ended
