"""<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>: GLM 4.5 to 4.7."""

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
_KEY, _KEY_CLOSING = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_CLOSING = "<arg_value>", "</arg_value>"
_NAME_CHARACTERS = re.compile(r"[a-zA-Z0-9_.-]+")


class Glm4(ToolFormat):
    """Reads calls with and without line breaks; has_lines selects those that the model must make."""

    name = "glm4"
    markers: tuple[str, ...] = (_OPENING, _CLOSING, _KEY, _KEY_CLOSING, _VALUE, _VALUE_CLOSING)
    trigger: str | None = _OPENING
    opening = ""
    separator = "\n"
    closing = ""

    def __init__(self, *, has_lines: bool) -> None:
        self._line_break = "\n" if has_lines else ""
        middle = f"{_KEY_CLOSING}{self._line_break}{_VALUE}"
        self._layout = ParameterLayout(_KEY, middle, _VALUE_CLOSING, self._line_break)
        self.parameters = self._layout

    def around(self, name: str) -> tuple[str, str]:
        return f"{_OPENING}{name}{self._line_break}", _CLOSING

    def around_json(self, name: str) -> tuple[str, str]:
        return Hermes().around(name)

    def read(self, reader: Reader, output: ParsedOutput, functions: Functions) -> Reading[None]:
        while (yield from reader.until(_OPENING, output.content)):
            reader.hold()
            yield from reader.accept(_OPENING)
            yield from reader.skip_spaces()
            if (yield from reader.peek()) == "{":
                yield from read_tagged_json(reader, output)
            else:
                yield from self._read_call(reader, output, functions)

    def _read_call(self, reader: Reader, output: ParsedOutput, functions: Functions) -> Reading[None]:
        try:
            parts: list[str] = []
            yield from reader.run(_NAME_CHARACTERS, parts.append)
            name = "".join(parts)
            if not is_function_name(name):
                raise Malformed
            yield from reader.skip_spaces()
            has_parameters = yield from reader.accept(_KEY)
            if not has_parameters:
                yield from reader.expect(_CLOSING)
            reader.release()
            parameters = ParameterReader(output, name, functions.get(name, {}), self._layout)
            if has_parameters:
                yield from _read_parameters(reader, parameters)
            parameters.end()
            output.end_call()
        except Malformed:
            output.content(reader.release())


def _read_parameters(reader: Reader, parameters: ParameterReader) -> Reading[None]:
    """Read parameters up to the end of the call. The opening of the first key is read."""
    while True:
        parts: list[str] = []
        yield from reader.until(_KEY_CLOSING, parts.append)
        yield from reader.expect(_KEY_CLOSING)
        yield from reader.skip_spaces()
        yield from reader.expect(_VALUE)
        yield from parameters.read(reader, "".join(parts))
        yield from reader.skip_spaces()
        if (yield from reader.accept(_CLOSING)):
            return
        yield from reader.expect(_KEY)
