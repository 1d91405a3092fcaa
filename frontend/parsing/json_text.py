"""Reads JSON (RFC 8259) while it arrives and emits it unchanged, including the part before an error.

What models get wrong is repaired on the way: raw control characters, wrong escapes, commas before a closing bracket,
NaN, and values as Python writes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from penstock.frontend.parsing.reader import Malformed, Reader, Reading

_SPACES = re.compile(r"[ \t\r\n]+")
_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]+'), "'": re.compile(r"[^'\"\\\x00-\x1f]+")}
"""Characters of a string that need no escape, by its quotes."""
_WORD_CHARACTERS = re.compile(r"[-+.\w]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?", re.ASCII)
_HEX = frozenset("0123456789abcdefABCDEF")
_WORDS = {
    **{word: word for word in ("true", "false", "null")},
    "True": "true",
    "False": "false",
    "None": "null",
    **dict.fromkeys(("NaN", "nan", "Infinity", "-Infinity"), "null"),
}
_LONGEST_WORD = max(map(len, _WORDS))
_CLOSERS = {"{": "}", "[": "]"}


def read_json(reader: Reader, emit: Callable[[str], object]) -> Reading[None]:
    """Read and emit one value. Raises Malformed."""
    closers: list[str] = []
    while True:
        first = yield from reader.peek()
        if (closer := _CLOSERS.get(first)) is not None:
            emit((yield from reader.next()))
            yield from reader.run(_SPACES, emit)
            closers.append(closer)
            if (yield from reader.peek()) != closer:
                if closer == "}":
                    yield from _read_key(reader, emit)
                continue
        else:
            yield from _read_scalar(reader, emit, first)
        if not (yield from _has_more(reader, emit, closers)):
            return


def _has_more(reader: Reader, emit: Callable[[str], object], closers: list[str]) -> Reading[bool]:
    """Close the objects and arrays that end here. Return whether another value follows."""
    while closers:
        yield from reader.run(_SPACES, emit)
        spaces: list[str] = []
        has_comma = yield from reader.accept(",")
        if has_comma:
            yield from reader.run(_SPACES, spaces.append)
        if (yield from reader.accept(closers[-1])):
            emit("".join((*spaces, closers.pop())))
            continue
        if not has_comma:
            raise Malformed
        emit("".join((",", *spaces)))
        if closers[-1] == "}":
            yield from _read_key(reader, emit)
        return True
    return False


def _read_key(reader: Reader, emit: Callable[[str], object]) -> Reading[None]:
    yield from read_json_string(reader, emit)
    yield from reader.run(_SPACES, emit)
    yield from reader.expect(":")
    emit(":")
    yield from reader.run(_SPACES, emit)


def _read_scalar(reader: Reader, emit: Callable[[str], object], first: str) -> Reading[None]:
    if first in _PLAIN:
        yield from read_json_string(reader, emit)
        return
    parts: list[str] = []
    yield from reader.run(_WORD_CHARACTERS, parts.append)
    word = "".join(parts)
    if len(word) <= _LONGEST_WORD and word in _WORDS:
        word = _WORDS[word]
    elif _NUMBER.fullmatch(word) is None:
        raise Malformed
    emit(word)


def read_json_string(reader: Reader, emit: Callable[[str], object]) -> Reading[None]:
    """Read and emit one string with its quotes; those of Python become JSON's. Raises Malformed."""
    quote = yield from reader.next()
    if quote not in _PLAIN:
        raise Malformed
    emit('"')
    while True:
        yield from reader.run(_PLAIN[quote], emit)
        character = yield from reader.next()
        if character == quote:
            emit('"')
            return
        if character == "\\":
            emit((yield from _read_escape(reader)))
        else:  # a control character, or JSON's quote in a string of Python
            emit(msgspec.json.encode(character).decode()[1:-1])


def _read_escape(reader: Reader) -> Reading[str]:
    """Return an escape, whose backslash is read. The backslash of a wrong one is text."""
    escape = yield from reader.peek()
    if escape == "'":
        return (yield from reader.next())
    if escape == "u":
        yield from reader.next()
        digits = ""
        while len(digits) < 4 and (digit := (yield from reader.peek())) in _HEX:
            digits += digit
            yield from reader.next()
        return f"\\u{digits}" if len(digits) == 4 else f"\\\\u{digits}"
    if escape and escape in '"\\/bfnrt':
        return "\\" + (yield from reader.next())
    return "\\\\"


def repaired_json(text: str, position: int = 0) -> tuple[str, int] | None:
    """Read the value that begins at the position of a text; return it and its end, or None if there is none."""
    reader, parts = Reader(), list[str]()
    reader.push(text[position:])
    reader.end()
    try:
        for _ in read_json(reader, parts.append):
            raise AssertionError("a reading paused after the end of its text")
    except Malformed:
        return None
    return "".join(parts), position + reader.num_read
