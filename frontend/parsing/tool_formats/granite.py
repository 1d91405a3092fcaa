"""<|tool_call|>[{"name": …, "arguments": {…}}, …]: Granite 3. Granite 4 writes calls as `hermes` does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.frontend.parsing.tool_formats.base import ToolFormat, is_function_name, read_json_call, read_json_calls

if TYPE_CHECKING:
    from penstock.frontend.parsing.parsed_output import ParsedOutput
    from penstock.frontend.parsing.reader import Reader, Reading
    from penstock.frontend.parsing.tool_formats.base import Functions

_TOOL_CALL = "<|tool_call|>"
_PLAIN_TOOL_CALL = "<tool_call>"


class Granite(ToolFormat):
    """Granite 3.1 may write the mark without bars."""

    name = "granite"
    markers: tuple[str, ...] = (_TOOL_CALL, _PLAIN_TOOL_CALL)
    trigger: str | None = _TOOL_CALL
    opening = f"{_TOOL_CALL}["
    separator = ", "
    closing = "]"

    def around(self, name: str) -> tuple[str, str]:
        return f'{{"name": {msgspec.json.encode(name).decode()}, "arguments": ', "}"

    def read(self, reader: Reader, output: ParsedOutput, _functions: Functions) -> Reading[None]:
        while (mark := (yield from reader.until_any((_TOOL_CALL, _PLAIN_TOOL_CALL), output.content))) is not None:
            reader.hold()
            yield from reader.accept(mark)
            yield from reader.skip_spaces()
            if (yield from reader.accept("[")):
                yield from read_json_calls(reader, output)
            else:
                yield from read_json_call(reader, output, is_function_name)
