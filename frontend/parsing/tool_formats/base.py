"""The interface of a tool call format, and the JSON object that most formats use for a call."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from msgspec import Raw

from penstock.frontend.parsing.json_text import read_json, read_json_string
from penstock.frontend.parsing.parsed_output import ParsedOutput
from penstock.frontend.parsing.reader import Malformed, Reader, Reading

CALL_NUMBER = "\0"
"""Stands for a number of the model's choice in the texts around a call. No function's name contains it."""

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")

Functions = Mapping[str, Mapping[str, Any]]
"""The functions that the model may call: the JSON schemas of their arguments by name."""


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """A format's parameters, if it writes them one by one: opening, key, middle, value, closing, gap.

    A text is written unquoted, any other value as JSON.
    """

    opening: str
    middle: str
    closing: str
    """The end of a value: a text cannot contain it."""
    gap: str
    """The text between a parameter and the next part."""
    is_indented: bool = False
    """The value has its own lines: the line breaks around it are not part of it."""
    json_middle: str = ""
    """Takes the place of `middle` before a value in JSON, if the two differ."""


@dataclass(frozen=True, slots=True)
class MessageLayout:
    """The messages of an answer, in a format that has text only in messages."""

    openings: tuple[str, ...]
    """Each of them begins a message that is not a call."""
    separator: str
    """The text between a message and the next message or call."""


class ToolFormat(Protocol):
    """Reads the calls in an answer, and describes how a model must write them.

    A malformed call becomes text of the answer, unchanged. Arguments are streamed as they arrive: if the error is
    within them, the call is reported as broken.
    """

    name: str
    markers: tuple[str, ...]
    """Texts of the layout. Any of them may be a special token."""
    trigger: str | None
    """The text that begins a call and nothing else; None if an answer may begin like a call."""
    triggers: tuple[str, ...] = ()
    """Texts any of which begins a call within reasoning."""
    opening: str
    separator: str
    closing: str
    """An answer of calls only is: opening, calls joined by separator, closing."""
    max_calls: int = 16
    """Calls that a grammar allows in one answer."""
    parameters: ParameterLayout | None = None
    """None if the arguments are a JSON object."""
    messages: MessageLayout | None = None
    """None if text needs no marks."""

    def around(self, name: str) -> tuple[str, str]:
        """Return the texts of a call before and after its arguments."""

    def read(self, reader: Reader, output: ParsedOutput, functions: Functions, /) -> Reading[None]:
        """Read an answer, or the rest of one, with calls of these functions. Unread text is content."""

    def new_call_id(self) -> str:
        """Return a random id, so that ids of other requests cannot be guessed."""
        return f"call_{secrets.token_hex(12)}"


def is_function_name(name: str) -> bool:
    """Whether a request could have declared this name.

    After a format's own marker, any such name makes a call, declared or not: the client can best report that it has no
    such function.
    """
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class ObjectKeys:
    """The members of a call's JSON object."""

    names: frozenset[str] = frozenset({"name", "tool_name"})
    arguments: frozenset[str] = frozenset({"arguments", "parameters"})
    is_nested: bool = False
    """The call is {name: {…}}."""


def read_object_call(
    reader: Reader, output: ParsedOutput, is_callable: Callable[[str], bool], keys: ObjectKeys
) -> Reading[None]:
    """Read {"name": …, "arguments": {…}}, members in any order, others ignored. Raises Malformed."""
    yield from reader.skip_spaces()
    if keys.is_nested:
        yield from _read_named_member(reader, output, is_callable)
    else:
        yield from _read_members(reader, output, is_callable, keys)
    output.end_call()


def _read_named_member(reader: Reader, output: ParsedOutput, is_callable: Callable[[str], bool]) -> Reading[None]:
    yield from reader.expect("{")
    yield from reader.skip_spaces()
    name = yield from _read_text(reader)
    yield from reader.skip_spaces()
    yield from reader.expect(":")
    yield from reader.skip_spaces()
    if not is_callable(name) or (yield from reader.peek()) != "{":
        raise Malformed
    yield from read_arguments(reader, output, name)
    yield from reader.skip_spaces()
    yield from reader.expect("}")


def _read_members(
    reader: Reader, output: ParsedOutput, is_callable: Callable[[str], bool], keys: ObjectKeys
) -> Reading[None]:
    name: str | None = None
    arguments: list[str] = []
    is_streamed = False
    yield from reader.expect("{")
    yield from reader.skip_spaces()
    while not (yield from reader.accept("}")):
        key = yield from _read_text(reader)
        yield from reader.skip_spaces()
        yield from reader.expect(":")
        yield from reader.skip_spaces()
        if key in keys.names and name is None:
            name = yield from _read_text(reader)
            if not is_callable(name):
                raise Malformed
        elif key in keys.arguments and not arguments and not is_streamed:
            if name is not None and (yield from reader.peek()) == "{":
                is_streamed = True
                yield from read_arguments(reader, output, name)
            else:
                yield from read_json(reader, arguments.append)
        else:
            yield from read_json(reader, drop)
        yield from reader.skip_spaces()
        if (yield from reader.accept(",")):
            yield from reader.skip_spaces()
        elif (yield from reader.accept("}")) or is_streamed:  # the last brace may be missing
            break
        else:
            raise Malformed
    if name is None:
        raise Malformed
    if not is_streamed:
        whole = _as_object("".join(arguments))
        output.begin_call(name)
        output.arguments(whole)


def read_arguments(reader: Reader, output: ParsedOutput, name: str) -> Reading[None]:
    """Read the arguments of a call and emit them as they arrive."""
    output.begin_call(name)
    yield from read_json(reader, output.arguments)


def _as_object(arguments: str) -> str:
    """Return the arguments as a JSON object. Missing or null is empty; some models wrap the object in a string."""
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
    """Ignore a part of a call that has no meaning here."""
