"""What a tool call format says, and the JSON object that most of them have."""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec import Raw

from penstock.frontend.parsing.json_text import read_json, read_json_string
from penstock.frontend.parsing.reader import Malformed, Reader, Reading

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.frontend.parsing.parsed_output import ParsedOutput

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
_ARGUMENTS_KEYS = ("arguments", "parameters")


class ToolFormat(Protocol):
    """Reads the calls in an answer, and says how a model is to write them.

    A call that is not well-formed is text of the answer. Where that shows in its arguments, which are told as they
    come, the text goes on from there.
    """

    name: str
    markers: tuple[str, ...]
    """Texts of the layout that may be special tokens."""
    trigger: str | None
    """The text that only a call begins with; None where it begins as an answer might."""
    opening: str
    separator: str
    closing: str
    """An answer that is nothing but calls: opening, calls with separators between, closing."""

    def around(self, name: str) -> tuple[str, str]:
        """A call is these two texts, with the JSON object of its arguments between."""
        ...

    def read(self, reader: Reader, output: ParsedOutput, names: frozenset[str], /) -> Reading[None]:
        """An answer with calls of these functions in it, or a part of one: what is left unread is text."""
        ...

    def new_call_id(self) -> str:
        """At random: nobody guesses another's."""
        ...


def openai_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def is_function_name(name: str) -> bool:
    """Whether a request could have declared it. Behind a format's own marker any such name is a call: who asked can
    say best that there is no such function."""
    return _NAME.fullmatch(name) is not None


def read_json_call(reader: Reader, output: ParsedOutput, is_callable: Callable[[str], bool]) -> Reading[bool]:
    """{"name": …, "arguments": {…}}, in any order, other members ignored. The reader holds what stands before it.

    What is no call is passed on as text, as far as it was read; then the result is False.
    """
    try:
        yield from reader.skip_spaces()
        yield from _read_members(reader, output, is_callable)
    except Malformed:
        output.content(reader.release())
        return False
    reader.release()
    output.end_call()
    return True


def _read_members(reader: Reader, output: ParsedOutput, is_callable: Callable[[str], bool]) -> Reading[None]:
    name: str | None = None
    arguments: list[str] = []
    is_told = False
    yield from reader.expect("{")
    while True:
        yield from reader.skip_spaces()
        key = yield from _read_text(reader)
        yield from reader.skip_spaces()
        yield from reader.expect(":")
        yield from reader.skip_spaces()
        if key == "name" and name is None:
            name = yield from _read_text(reader)
            if not is_callable(name):
                raise Malformed
        elif key in _ARGUMENTS_KEYS and not arguments and not is_told:
            if name is not None and (yield from reader.peek()) == "{":
                is_told = True
                yield from read_arguments(reader, output, name)
            else:
                yield from read_json(reader, arguments.append)
        else:
            yield from read_json(reader, drop)
        yield from reader.skip_spaces()
        if (yield from reader.accept("}")):
            break
        yield from reader.expect(",")
    if name is None:
        raise Malformed
    if not is_told:
        whole = _as_object("".join(arguments))
        output.begin_call(name)
        output.arguments(whole)


def read_arguments(reader: Reader, output: ParsedOutput, name: str) -> Reading[None]:
    """The arguments' object of a call that is certain from here on."""
    reader.release()
    output.begin_call(name)
    yield from read_json(reader, output.arguments)
    reader.hold()


def _as_object(arguments: str) -> str:
    """None at all, or null, is an empty one; some models put the object into a text."""
    if arguments in ("", "null"):
        return "{}"
    try:
        decoded = msgspec.json.decode(arguments, type=str | dict[str, Raw])
        text = decoded if isinstance(decoded, str) else arguments
        msgspec.json.decode(text, type=dict[str, Raw])
    except (msgspec.DecodeError, RecursionError):
        raise Malformed from None
    return text


def _read_text(reader: Reader) -> Reading[str]:
    parts: list[str] = []
    yield from read_json_string(reader, parts.append)
    try:
        return msgspec.json.decode("".join(parts), type=str)
    except msgspec.DecodeError:  # half of a surrogate pair
        raise Malformed from None


def drop(_text: str) -> None:
    """What stands in a call and says nothing to us."""
