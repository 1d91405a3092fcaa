"""{"name": …, "parameters": {…}}, one or several joined by semicolons, as the whole answer or after <|python_tag|>:
Llama 3.1 to 3.3."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from penstock.frontend.parsing.tool_formats.base import ToolFormat, read_json_call

if TYPE_CHECKING:
    from penstock.frontend.parsing.parsed_output import ParsedOutput
    from penstock.frontend.parsing.reader import Reader, Reading
    from penstock.frontend.parsing.tool_formats.base import Functions

_PYTHON_TAG = "<|python_tag|>"


class Llama3Json(ToolFormat):
    """An object that does not name one of the request's functions is an answer in JSON."""

    name = "llama3_json"
    markers: tuple[str, ...] = (_PYTHON_TAG,)
    trigger: str | None = None
    opening = ""
    separator = "; "
    closing = ""

    def around(self, name: str) -> tuple[str, str]:
        return f'{{"name": {msgspec.json.encode(name).decode()}, "parameters": ', "}"

    def read(self, reader: Reader, output: ParsedOutput, functions: Functions) -> Reading[None]:
        reader.hold()
        yield from reader.skip_spaces()
        if (yield from reader.peek()) == "{":
            yield from _read_calls(reader, output, functions)
        else:
            output.content(reader.release())
        while (yield from reader.until(_PYTHON_TAG, output.content)):
            reader.hold()
            yield from reader.accept(_PYTHON_TAG)
            yield from _read_calls(reader, output, functions)


def _read_calls(reader: Reader, output: ParsedOutput, functions: Functions) -> Reading[None]:
    while (yield from read_json_call(reader, output, functions.__contains__)):
        reader.hold()
        yield from reader.skip_spaces()
        yield from reader.accept(";")
        yield from reader.skip_spaces()
        if (yield from reader.peek()) != "{":
            output.content(reader.release())
            return
