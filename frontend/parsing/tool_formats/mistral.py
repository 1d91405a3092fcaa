"""[TOOL_CALLS] with a list of {"name": …, "arguments": {…}}, and the later [TOOL_CALLS]name[ARGS]{…}: Mistral."""

from __future__ import annotations

import re
import secrets
import string
from typing import TYPE_CHECKING

import msgspec

from penstock.frontend.parsing.reader import Malformed
from penstock.frontend.parsing.tool_formats.base import (
    ToolFormat,
    drop,
    is_function_name,
    read_arguments,
    read_json_calls,
)

if TYPE_CHECKING:
    from penstock.frontend.parsing.parsed_output import ParsedOutput
    from penstock.frontend.parsing.reader import Reader, Reading
    from penstock.frontend.parsing.tool_formats.base import Functions

_TOOL_CALLS = "[TOOL_CALLS]"
_CALL_ID = "[CALL_ID]"
_ARGUMENTS = "[ARGS]"
_NAME_CHARACTERS = re.compile(r"[a-zA-Z0-9_.-]+")
_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 9


class Mistral(ToolFormat):
    """Reads both layouts; names_first selects the layout for calls that the model must make."""

    name = "mistral"
    markers: tuple[str, ...] = (_TOOL_CALLS, _CALL_ID, _ARGUMENTS)
    trigger: str | None = _TOOL_CALLS

    def __init__(self, *, names_first: bool) -> None:
        self._names_first = names_first
        self.opening, self.separator, self.closing = ("", "", "") if names_first else (f"{_TOOL_CALLS}[", ", ", "]")

    def around(self, name: str) -> tuple[str, str]:
        if self._names_first:
            return f"{_TOOL_CALLS}{name}{_ARGUMENTS}", ""
        return f'{{"name": {msgspec.json.encode(name).decode()}, "arguments": ', "}"

    def read(self, reader: Reader, output: ParsedOutput, _functions: Functions) -> Reading[None]:
        while (yield from reader.until(_TOOL_CALLS, output.content)):
            reader.hold()
            yield from reader.accept(_TOOL_CALLS)
            yield from reader.skip_spaces()
            if (yield from reader.accept("[")):
                yield from read_json_calls(reader, output)
            else:
                yield from _read_named(reader, output)

    def new_call_id(self) -> str:
        """Return 9 letters and digits: the templates of this family refuse any other id."""
        return "".join(secrets.choice(_ALPHABET) for _ in range(_ID_LENGTH))


def _read_named(reader: Reader, output: ParsedOutput) -> Reading[None]:
    try:
        name: list[str] = []
        yield from reader.run(_NAME_CHARACTERS, name.append)
        if not is_function_name("".join(name)):
            raise Malformed
        if (yield from reader.accept(_CALL_ID)):
            yield from reader.run(_NAME_CHARACTERS, drop)
        yield from reader.accept(_ARGUMENTS)
        yield from reader.skip_spaces()
        if (yield from reader.peek()) != "{":
            raise Malformed
        yield from read_arguments(reader, output, "".join(name))
    except Malformed:
        output.content(reader.release())
    else:
        reader.release()
        output.end_call()
