"""<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{…}<|tool_call_end|>, in a section: Kimi K2."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.frontend.parsing.reader import Malformed
from penstock.frontend.parsing.tool_formats.base import (
    CALL_NUMBER,
    ToolFormat,
    is_function_name,
    read_arguments,
    read_section,
)

if TYPE_CHECKING:
    from penstock.frontend.parsing.parsed_output import ParsedOutput
    from penstock.frontend.parsing.reader import Reader, Reading
    from penstock.frontend.parsing.tool_formats.base import Functions

SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"
_FUNCTIONS = "functions."
_ID_CHARACTERS = re.compile(r"[a-zA-Z0-9_.:-]+")


class KimiK2(ToolFormat):
    """The model numbers the calls of a conversation; the chat template numbers them again, so the
    numbers are not reported."""

    name = "kimi_k2"
    markers: tuple[str, ...] = (SECTION, _SECTION_END, _CALL, _CALL_END, _ARGUMENTS)
    trigger: str | None = SECTION
    opening = SECTION
    separator = ""
    closing = _SECTION_END

    def around(self, name: str) -> tuple[str, str]:
        return f"{_CALL}{_FUNCTIONS}{name}:{CALL_NUMBER}{_ARGUMENTS}", _CALL_END

    def read(self, reader: Reader, output: ParsedOutput, _functions: Functions) -> Reading[None]:
        while (yield from reader.until_any((SECTION, _CALL), output.content)):
            reader.hold()
            yield from reader.accept(SECTION)
            yield from read_section(reader, output, _CALL, (_SECTION_END,), lambda: _read_call(reader, output))


def _read_call(reader: Reader, output: ParsedOutput) -> Reading[None]:
    parts: list[str] = []
    yield from reader.skip_spaces()
    yield from reader.run(_ID_CHARACTERS, parts.append)
    name = "".join(parts).removeprefix(_FUNCTIONS).partition(":")[0]
    yield from reader.skip_spaces()
    yield from reader.expect(_ARGUMENTS)
    yield from reader.skip_spaces()
    is_empty = yield from reader.accept(_CALL_END)
    if not is_function_name(name) or not (is_empty or (yield from reader.peek()) == "{"):
        raise Malformed
    if is_empty:
        output.begin_call(name)
        output.arguments("{}")
    else:
        yield from read_arguments(reader, output, name)
        yield from reader.skip_spaces()
        yield from reader.accept(_CALL_END)
    output.end_call()
