"""[f(a=1), g(b="x")] as the whole answer: Llama 3.2 and 4, ToolACE and others."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from penstock.frontend.parsing.reader import Malformed
from penstock.frontend.parsing.tool_formats.base import ToolFormat
from penstock.frontend.parsing.tool_formats.python_values import read_value

if TYPE_CHECKING:
    from penstock.frontend.parsing.parsed_output import ParsedOutput
    from penstock.frontend.parsing.reader import Reader, Reading
    from penstock.frontend.parsing.tool_formats.base import Functions

_NAME_CHARACTERS = re.compile(r"[a-zA-Z0-9_.-]+")
_WORD = re.compile(r"\w+")


class Pythonic(ToolFormat):
    """A call is emitted when its last parenthesis has arrived, with its arguments as JSON."""

    name = "pythonic"
    markers: tuple[str, ...] = ()
    trigger: str | None = None
    opening = "["
    separator = ", "
    closing = "]"

    def around(self, name: str) -> tuple[str, str]:
        # Keyword arguments cannot express every schema.
        return f"{name}(**", ")"

    def read(self, reader: Reader, output: ParsedOutput, functions: Functions) -> Reading[None]:
        reader.hold()
        try:
            yield from reader.skip_spaces()
            yield from reader.expect("[")
            while True:
                yield from _read_call(reader, output, functions)
                reader.hold()
                yield from reader.skip_spaces()
                if not (yield from reader.accept(",")):
                    yield from reader.expect("]")
                    reader.release()
                    return
        except Malformed:
            output.content(reader.release())


def _read_call(reader: Reader, output: ParsedOutput, functions: Functions) -> Reading[None]:
    yield from reader.skip_spaces()
    parts: list[str] = []
    yield from reader.run(_NAME_CHARACTERS, parts.append)
    name = "".join(parts)
    if name not in functions:
        raise Malformed
    yield from reader.expect("(")
    arguments: dict[str, Any] = {}
    yield from reader.skip_spaces()
    while not (yield from reader.accept(")")):
        arguments.update((yield from _read_argument(reader)))
        yield from reader.skip_spaces()
        if not (yield from reader.accept(",")):
            yield from reader.expect(")")
            break
        yield from reader.skip_spaces()
    output.begin_call(name)
    output.arguments(json.dumps(arguments, ensure_ascii=False))
    output.end_call()


def _read_argument(reader: Reader) -> Reading[dict[str, Any]]:
    """Read one keyword argument, or a dict of them after two stars."""
    if (yield from reader.accept("**")):
        unpacked = yield from read_value(reader)
        if not isinstance(unpacked, dict):
            raise Malformed
        return unpacked
    parts: list[str] = []
    yield from reader.run(_WORD, parts.append)
    if not parts:
        raise Malformed
    yield from reader.skip_spaces()
    yield from reader.expect("=")
    yield from reader.skip_spaces()
    return {"".join(parts): (yield from read_value(reader))}
