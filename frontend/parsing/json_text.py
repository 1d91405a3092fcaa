"""Reads JSON (RFC 8259) while it arrives and emits it unchanged, including the part before an error."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.frontend.parsing.reader import Malformed, Reader, Reading

if TYPE_CHECKING:
    from collections.abc import Callable

_SPACES = re.compile(r"[ \t\r\n]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_NUMBER_CHARACTERS = re.compile(r"[-+.0-9eE]+")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_HEX = frozenset("0123456789abcdefABCDEF")
_WORDS = {"t": "true", "f": "false", "n": "null"}
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
        if (yield from reader.accept(closers[-1])):
            emit(closers.pop())
            continue
        yield from reader.expect(",")
        emit(",")
        yield from reader.run(_SPACES, emit)
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
    if first == '"':
        yield from read_json_string(reader, emit)
    elif (word := _WORDS.get(first)) is not None:
        for character in word:
            yield from reader.expect(character)
            emit(character)
    else:
        parts: list[str] = []
        yield from reader.run(_NUMBER_CHARACTERS, parts.append)
        number = "".join(parts)
        emit(number)
        if _NUMBER.fullmatch(number) is None:
            raise Malformed


def read_json_string(reader: Reader, emit: Callable[[str], object]) -> Reading[None]:
    """Read and emit one string with its quotes. Raises Malformed."""
    yield from reader.expect('"')
    emit('"')
    while True:
        yield from reader.run(_PLAIN, emit)
        if (yield from reader.accept('"')):
            emit('"')
            return
        yield from reader.expect("\\")
        emit("\\")
        escape = yield from reader.peek()
        if not escape or escape not in '"\\/bfnrtu':
            raise Malformed
        emit((yield from reader.next()))
        for _ in range(4 if escape == "u" else 0):
            if (yield from reader.peek()) not in _HEX:
                raise Malformed
            emit((yield from reader.next()))
