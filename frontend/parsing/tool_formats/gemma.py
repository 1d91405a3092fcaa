"""<start_function_call>call:name{key:<escape>text<escape>,key:5}<end_function_call>: FunctionGemma, and Gemma 4 with
other marks. The templates of Gemma 2 and 3 have no tools."""

from __future__ import annotations

import re
from collections.abc import Callable

from penstock.frontend.parsing.json_text import read_json_string
from penstock.frontend.parsing.parsed_output import ParsedOutput
from penstock.frontend.parsing.reader import Malformed, Reader, Reading
from penstock.frontend.parsing.tool_formats.base import Functions, ToolFormat, is_function_name
from penstock.frontend.parsing.tool_formats.parameters import ANY, as_json, json_string

_CALL = "call:"
_NAME_CHARACTERS = re.compile(r"[a-zA-Z0-9_.-]+")
_KEY_CHARACTERS = re.compile(r"""[^\s"'<>{}\[\],:]+""")
_WORD_CHARACTERS = re.compile(r"[-+.\w]+")
_SPACES = re.compile(r"[ \t\r\n]+")
_MAX_DEPTH = 64


class Gemma(ToolFormat):
    """Arguments may also be JSON, as in calls that a grammar enforces."""

    name = "gemma"
    opening = ""
    separator = ""
    closing = ""

    def __init__(self, *, is_fourth: bool) -> None:
        """is_fourth selects the marks of Gemma 4."""
        self._call, self._call_end, self._quote = (
            ("<|tool_call>", "<tool_call|>", '<|"|>')
            if is_fourth
            else ("<start_function_call>", "<end_function_call>", "<escape>")
        )
        self.markers = (self._call, self._call_end, self._quote)
        self.trigger = self._call
        self.triggers = (self._call,)

    def around(self, name: str) -> tuple[str, str]:
        # No grammar for values in these quotes can be made from a JSON schema.
        return f"{self._call}{_CALL}{name}", self._call_end

    def read(self, reader: Reader, output: ParsedOutput, _functions: Functions) -> Reading[None]:
        while (yield from reader.until(self._call, output.content)):
            reader.hold()
            yield from reader.accept(self._call)
            try:
                yield from self._read_call(reader, output)
            except Malformed:
                output.give_back(reader.release())

    def _read_call(self, reader: Reader, output: ParsedOutput) -> Reading[None]:
        parts: list[str] = []
        yield from reader.skip_spaces()
        yield from reader.accept(_CALL[:-1])  # models forget it
        yield from reader.expect(_CALL[-1])
        yield from reader.run(_NAME_CHARACTERS, parts.append)
        name = "".join(parts)
        if not is_function_name(name) or (yield from reader.peek()) != "{":
            raise Malformed
        output.begin_call(name)
        yield from _Values(reader, output.arguments, self._quote).read(0)
        yield from reader.skip_spaces()
        yield from reader.accept(self._call_end)
        output.end_call()
        reader.release()


class _Values:
    """Reads values and emits them as JSON while they arrive."""

    def __init__(self, reader: Reader, emit: Callable[[str], object], quote: str) -> None:
        self._reader = reader
        self._emit = emit
        self._quote = quote

    def read(self, depth: int) -> Reading[None]:
        """Read one value. Raises Malformed."""
        if depth > _MAX_DEPTH:
            raise Malformed
        first = yield from self._reader.peek()
        if first in ("{", "["):
            self._emit((yield from self._reader.next()))
            yield from self._read_members("}" if first == "{" else "]", depth)
        elif not (yield from self._read_text()):
            parts: list[str] = []
            yield from self._reader.run(_WORD_CHARACTERS, parts.append)
            if not parts:
                raise Malformed
            self._emit(as_json("".join(parts), ANY))

    def _read_members(self, closer: str, depth: int) -> Reading[None]:
        reader, emit = self._reader, self._emit
        yield from reader.run(_SPACES, emit)
        has_ended = yield from reader.accept(closer)
        while not has_ended:
            if closer == "}":
                yield from self._read_key()
            yield from self.read(depth + 1)
            yield from reader.run(_SPACES, emit)
            has_ended = yield from reader.accept(closer)
            if not has_ended:
                yield from reader.expect(",")
                emit(",")
                yield from reader.run(_SPACES, emit)
        emit(closer)

    def _read_key(self) -> Reading[None]:
        if not (yield from self._read_text()):
            parts: list[str] = []
            yield from self._reader.run(_KEY_CHARACTERS, parts.append)
            if not parts:
                raise Malformed
            self._emit(json_string("".join(parts)))
        yield from self._reader.run(_SPACES, self._emit)
        yield from self._reader.expect(":")
        self._emit(":")
        yield from self._reader.run(_SPACES, self._emit)

    def _read_text(self) -> Reading[bool]:
        """Read a text in the model's quotes or in JSON's. Return whether there was one."""
        reader, emit = self._reader, self._emit
        if (yield from reader.peek()) == '"':
            yield from read_json_string(reader, emit)
            return True
        if not (yield from reader.accept(self._quote)):
            return False
        emit('"')
        yield from reader.until(self._quote, lambda text: emit(json_string(text)[1:-1]), keeps_partial=False)
        yield from reader.expect(self._quote)
        emit('"')
        return True
