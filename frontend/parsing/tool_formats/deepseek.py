"""DeepSeek's calls between its own tokens: in V3 and R1 with the arguments in a block of code, from V3.1 on without."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.frontend.parsing.reader import Malformed
from penstock.frontend.parsing.tool_formats.base import ToolFormat, is_function_name, read_arguments, read_section

if TYPE_CHECKING:
    from penstock.frontend.parsing.parsed_output import ParsedOutput
    from penstock.frontend.parsing.reader import Reader, Reading
    from penstock.frontend.parsing.tool_formats.base import Functions

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_CODE, _CODE_END = "```json", "```"
_NAME_CHARACTERS = re.compile(r"[a-zA-Z0-9_.-]+")


class DeepSeek(ToolFormat):
    """Reads both layouts; in_code selects the one for calls that the model must make."""

    name = "deepseek"
    markers: tuple[str, ...] = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR)
    trigger: str | None = _CALLS
    opening = _CALLS
    closing = _CALLS_END

    def __init__(self, *, in_code: bool) -> None:
        self._in_code = in_code
        self.separator = "\n" if in_code else ""

    def around(self, name: str) -> tuple[str, str]:
        if self._in_code:
            return f"{_CALL}function{_SEPARATOR}{name}\n{_CODE}\n", f"\n{_CODE_END}{_CALL_END}"
        return f"{_CALL}{name}{_SEPARATOR}", _CALL_END

    def read(self, reader: Reader, output: ParsedOutput, _functions: Functions) -> Reading[None]:
        while (yield from reader.until_any((_CALLS, _CALL), output.content)):
            reader.hold()
            yield from reader.accept(_CALLS)
            yield from read_section(reader, output, _CALL, (_CALLS_END,), lambda: _read_call(reader, output))


def _read_call(reader: Reader, output: ParsedOutput) -> Reading[None]:
    """Read `name<sep>{…}`, or `function<sep>name` and the arguments in a block of code."""
    name = yield from _read_name(reader)
    yield from reader.skip_spaces()
    yield from reader.expect(_SEPARATOR)
    yield from reader.skip_spaces()
    if (yield from reader.peek()) != "{":
        name = yield from _read_name(reader)
        yield from reader.skip_spaces()
        yield from reader.accept(_CODE)
        yield from reader.skip_spaces()
    if not is_function_name(name) or (yield from reader.peek()) != "{":
        raise Malformed
    yield from read_arguments(reader, output, name)
    yield from reader.skip_spaces()
    yield from reader.accept(_CODE_END)
    yield from reader.skip_spaces()
    yield from reader.accept(_CALL_END)
    output.end_call()


def _read_name(reader: Reader) -> Reading[str]:
    parts: list[str] = []
    yield from reader.run(_NAME_CHARACTERS, parts.append)
    return "".join(parts)
