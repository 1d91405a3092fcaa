"""[f(a=1), g(b="x")] as the whole answer: Llama 3.2 and 4, ToolACE and others.

Values are read as Python and JSON write them. Nothing is evaluated.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from typing import Any

from penstock.frontend.parsing.parsed_output import ParsedOutput
from penstock.frontend.parsing.reader import Malformed, Reader, Reading
from penstock.frontend.parsing.tool_formats.base import Functions, ToolFormat, is_function_name

_MAX_DEPTH = 32
_WORD_CHARACTERS = re.compile(r"[-+.\w]+")
_WORDS: dict[str, Any] = {
    "True": True,
    "False": False,
    "None": None,
    "true": True,
    "false": False,
    "null": None,
}
_INTEGER = re.compile(r"-?(0|[1-9][0-9]{0,4000})")
_FLOAT = re.compile(r"-?[0-9]{1,400}(\.[0-9]{0,400})?([eE][-+]?[0-9]{1,4})?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]+")
_CLOSERS = {"[": "]", "(": ")"}


def read_value(reader: Reader, depth: int = 0) -> Reading[Any]:
    """Read one value. Raises Malformed, also for values nested more than 32 deep."""
    if depth > _MAX_DEPTH:
        raise Malformed
    first = yield from reader.peek()
    if first in ("'", '"'):
        return (yield from _read_string(reader))
    if first == "{":
        return (yield from _read_dict(reader, depth))
    if first in _CLOSERS:
        return (yield from _read_list(reader, depth, _CLOSERS[first]))
    parts: list[str] = []
    yield from reader.run(_WORD_CHARACTERS, parts.append)
    return _word("".join(parts))


def _word(word: str) -> Any:
    if word in _WORDS:
        return _WORDS[word]
    if _INTEGER.fullmatch(word):
        return int(word)
    if _FLOAT.fullmatch(word):
        value = float(word)
        if value - value == 0.0:  # finite, as JSON's numbers are
            return value
    raise Malformed


def _read_list(reader: Reader, depth: int, closer: str) -> Reading[list[Any]]:
    yield from reader.next()
    values: list[Any] = []
    yield from reader.skip_spaces()
    while not (yield from reader.accept(closer)):
        values.append((yield from read_value(reader, depth + 1)))
        if not (yield from _goes_on(reader, closer)):
            break
    return values


def _read_dict(reader: Reader, depth: int) -> Reading[dict[str, Any] | list[str]]:
    """Read a dict, or a set of texts as a list."""
    yield from reader.next()
    values: dict[str, Any] = {}
    is_set = False
    yield from reader.skip_spaces()
    while not (yield from reader.accept("}")):
        key = yield from _read_string(reader)
        yield from reader.skip_spaces()
        is_set = is_set or not (values or (yield from reader.peek()) == ":")
        values[key] = None
        if not is_set:
            yield from reader.expect(":")
            yield from reader.skip_spaces()
            values[key] = yield from read_value(reader, depth + 1)
        if not (yield from _goes_on(reader, "}")):
            break
    return list(values) if is_set else values


def _goes_on(reader: Reader, closer: str) -> Reading[bool]:
    """Read a comma or the closer after a value. Return whether another value may follow."""
    yield from reader.skip_spaces()
    if (yield from reader.accept(",")):
        yield from reader.skip_spaces()
        return True
    yield from reader.expect(closer)
    return False


def _read_string(reader: Reader) -> Reading[str]:
    quote = yield from reader.next()
    if quote not in ("'", '"'):
        raise Malformed
    parts: list[str] = []
    while (character := (yield from reader.next())) != quote:
        parts.append((yield from _read_escape(reader)) if character == "\\" else character)
    text = "".join(parts)
    try:
        # JSON escapes a character beyond 16 bits as two surrogates.
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise Malformed from None


def _read_escape(reader: Reader) -> Reading[str]:
    character = yield from reader.next()
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character not in _CODES:
        return character if character in "'\"\\/" else f"\\{character}"
    digits = ""
    for _ in range(_CODES[character]):
        digits += yield from reader.next()
    if _HEX.fullmatch(digits) is None or int(digits, 16) > sys.maxunicode:
        raise Malformed
    return chr(int(digits, 16))


_NAME_CHARACTERS = re.compile(r"[a-zA-Z0-9_.-]+")
_WORD = re.compile(r"\w+")


class Pythonic(ToolFormat):
    """A call is emitted when its last parenthesis has arrived, with its arguments as JSON."""

    name = "pythonic"
    trigger: str | None = None

    def __init__(self, marks: tuple[str, str] = ("", ""), *, is_list: bool = True) -> None:
        """marks stand around the list of calls; without marks, the list is the whole answer. is_list: the calls are in
        brackets, else on lines of their own."""
        self._marks = marks
        self.triggers = tuple(filter(None, marks[:1]))
        self.trigger = marks[0] or None
        self.markers = tuple(filter(None, marks))
        self.opening, self.separator, self.closing = (
            (f"{marks[0]}[", ", ", f"]{marks[1]}") if is_list else (f"{marks[0]}\n", "\n", f"\n{marks[1]}")
        )

    def around(self, name: str) -> tuple[str, str]:
        # Keyword arguments cannot express every schema.
        return f"{name}(**", ")"

    def read(self, reader: Reader, output: ParsedOutput, functions: Functions) -> Reading[None]:
        if not self.triggers:
            yield from self._read_calls(reader, output, functions.__contains__)
        while self.triggers and (yield from reader.until_any(self.triggers, output.content)):
            yield from self._read_calls(reader, output, is_function_name)

    def _read_calls(self, reader: Reader, output: ParsedOutput, is_callable: Callable[[str], bool]) -> Reading[None]:
        opening, closing = self._marks
        reader.hold()
        try:
            yield from reader.accept(opening)
            yield from reader.skip_spaces()
            is_list = yield from reader.accept("[")
            if not (is_list or self.triggers):
                raise Malformed
            while True:
                yield from _read_call(reader, output, is_callable)
                reader.hold()
                yield from reader.skip_spaces()
                has_comma = yield from reader.accept(",")
                if not has_comma and (is_list or (yield from reader.accept(closing))):
                    break
            if is_list:
                yield from reader.expect("]")
                reader.hold()
                yield from reader.skip_spaces()
                yield from reader.accept(closing)
            reader.release()
        except Malformed:
            output.give_back(reader.release())


def _read_call(reader: Reader, output: ParsedOutput, is_callable: Callable[[str], bool]) -> Reading[None]:
    yield from reader.skip_spaces()
    parts: list[str] = []
    yield from reader.run(_NAME_CHARACTERS, parts.append)
    name = "".join(parts)
    if not is_callable(name):
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


def keyword_arguments(arguments: str) -> str:
    """Write the arguments in JSON as models of this format do."""
    values = None
    with contextlib.suppress(ValueError, RecursionError):
        values = json.loads(arguments)
    if not isinstance(values, dict) or not all(map(_WORD.fullmatch, values)):
        return f"**{arguments}"
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
