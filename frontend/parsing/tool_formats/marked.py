"""Calls between marks: one reader for all formats that differ only in their marks.

A call is a JSON object with a name and arguments, or a name followed by arguments in JSON or by tagged parameters.
Spaces between marks do not matter, and most marks may be missing.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from penstock.frontend.parsing.parsed_output import ParsedOutput
from penstock.frontend.parsing.reader import Malformed, Reader, Reading
from penstock.frontend.parsing.tool_formats.base import (
    CALL_NUMBER,
    Functions,
    ObjectKeys,
    ParameterLayout,
    ToolFormat,
    drop,
    is_function_name,
    read_arguments,
    read_object_call,
)
from penstock.frontend.parsing.tool_formats.parameters import ParameterReader, json_string

_NAME_CHARACTERS = re.compile(r"[a-zA-Z0-9_.-]+")
_ID_CHARACTERS = re.compile(r"[a-zA-Z0-9_-]+")
_TRAILING_NAME = re.compile(r"[a-zA-Z0-9_.-]+$")
_PIECE = re.compile(
    rf"{CALL_NUMBER}|<[^<>\s{CALL_NUMBER}]*>?|\[/?[A-Z_ ]+\]|(?:(?!\[/?[A-Z_ ]+\])[^\s<{CALL_NUMBER}])+"
)
_IN_BRACKETS = re.compile(r"\[/?[A-Z_ ]+\]")
_FENCE = "```json\n"
_SHORTEST_MARK = 4
_KEYS = re.compile(r'"([^",]+)"\s*:')
_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The texts around calls, as the model writes them. `CALL_NUMBER` stands for a number or an id."""

    section: tuple[str, str] = ("", "")
    """Around all calls."""
    call: tuple[str, str] = ("", "")
    """Around each call; without an object, the first ends where the name begins."""
    separator: str = ""
    object: tuple[str, str, str] | None = None
    """A call's JSON object: the texts before the name, between it and the arguments, and after those."""
    is_list: bool = False
    """The objects are the members of a JSON list."""
    middle: str = ""
    """Between a name and arguments that are in no object."""
    parameters: ParameterLayout | None = None
    """Tagged parameters; None if the arguments are JSON."""
    starts: tuple[str, ...] = field(default=())
    """Other texts that begin calls."""
    short_ids: bool = False
    """The template takes ids of 9 letters and digits only."""


def pieces(text: str) -> tuple[str, ...]:
    """Split a text into its marks and words."""
    return tuple(_PIECE.findall(text))


def is_mark(piece: str) -> bool:
    """Whether a text is hardly ever part of an answer."""
    return len(piece) >= _SHORTEST_MARK and (piece[0] == "<" or _IN_BRACKETS.fullmatch(piece) is not None)


def inner_end(text: str) -> str:
    """Return what of a turn's end is more than the mark that ends it: marks with a word between them."""
    found = pieces(text)
    return text[: text.rindex(found[-1])] if len(found) > 1 and not all(map(is_mark, found)) else ""


class Marked(ToolFormat):
    """Reads and describes the calls of one set of marks."""

    def __init__(self, name: str, marks: CallMarks, added_tokens: Iterable[str] = ()) -> None:
        self.name = name
        self.marks = marks
        opening, closing = marks.section
        start, end = marks.call
        self.opening, self.closing = (f"{opening}[", f"]{closing}") if marks.is_list else (opening, closing)
        self.separator = marks.separator
        self.parameters = marks.parameters
        self._before, self._middle, self._after, self._keys = start, marks.middle, end, ObjectKeys()
        if marks.object is not None:
            before, self._middle, after = marks.object
            self._before, self._after = start + before, after + end
            self._keys = _keys_of(before, self._middle)
        prefix = _TRAILING_NAME.search(start) if marks.object is None else None
        self._prefix = "" if prefix is None else prefix[0]
        self._section = pieces(opening), pieces(closing)
        self._call = pieces(start[: len(start) - len(self._prefix)]), pieces(end)
        self._middle_pieces = pieces(marks.middle)
        self.triggers = self._find_triggers()
        texts = (self.opening, self._before, self._middle, self._after, self.closing, *marks.starts)
        if (layout := marks.parameters) is not None:
            texts += (layout.opening, layout.middle, layout.closing, layout.json_middle)
        tokens = {token for token in added_tokens if len(token.strip()) > 1 and any(token in text for text in texts)}
        tokens.update(piece for text in texts for piece in pieces(text) if is_mark(piece))
        self.markers = tuple(sorted(tokens, key=len, reverse=True))
        # A grammar cannot begin calls in the middle of a mark that stands before each of them.
        first = next(iter(self.triggers), "")
        self.trigger = first if opening or (self._call[0] and first in self.markers) else None

    def around(self, name: str) -> tuple[str, str]:
        quoted = json_string(name) if self._before.endswith('"') else f'"{name}"'
        return f"{self._before}{quoted[1:-1]}{self._middle}", self._after

    def new_call_id(self) -> str:
        if self.marks.short_ids:
            return "".join(secrets.choice(_ALPHABET) for _ in range(9))
        return super().new_call_id()

    def read(self, reader: Reader, output: ParsedOutput, functions: Functions) -> Reading[None]:
        is_bare = not self._section[0] and not self._call[0]
        if is_bare:
            yield from self._read_bare(reader, output, functions)
        leads = self.triggers + (self._bare_leads() if is_bare else ())
        while leads and (lead := (yield from reader.until_any(leads, output.content))):
            reader.hold()
            is_callable = is_function_name if lead in self.triggers else functions.__contains__
            try:
                yield from self._read_calls(reader, output, functions, is_callable)
            except Malformed:
                output.give_back(reader.release())

    def _find_triggers(self) -> tuple[str, ...]:
        """Return the marks that may come first: the section's first, or one of those with which a call begins."""
        leads: list[str] = []
        if self._section[0] or self._call[0]:
            for part, most in ((self._section[0], 1), (self._call[0], 2)):
                for piece in part[:most]:
                    if not is_mark(piece) and leads:
                        break
                    leads.append(piece)
        found = dict.fromkeys((*leads, *self.marks.starts))
        return tuple(lead for lead in found if not any(other != lead and other in lead for other in found))

    def _bare_leads(self) -> tuple[str, ...]:
        """Return the texts with which calls without a mark begin on a line behind a text."""
        opening, has_key, _ = self._before.partition('":')
        starts = (f'{opening}":', f'[{opening}":') if has_key else ()
        return tuple(f"\n{fence}{start}" for fence in ("", _FENCE) for start in starts)

    def _read_bare(self, reader: Reader, output: ParsedOutput, functions: Functions) -> Reading[None]:
        """Read an answer that is calls without a mark. Objects that name no function of the request are content."""
        reader.hold()
        yield from reader.skip_spaces()
        if (yield from reader.peek()) in ("{", "[", "`"):
            try:
                yield from self._read_calls(reader, output, functions, functions.__contains__)
            except Malformed:
                output.give_back(reader.release())
        else:
            output.content(reader.release())

    def _read_calls(
        self, reader: Reader, output: ParsedOutput, functions: Functions, is_callable: Callable[[str], bool]
    ) -> Reading[None]:
        """Read a call, or several without marks of their own. The reader is holding. Raises Malformed."""
        yield from reader.skip_spaces()
        for start in self.marks.starts:
            yield from reader.accept(start)
        is_fenced = yield from reader.accept(_FENCE)
        yield from _accept_all(reader, self._section[0])
        is_marked = yield from _accept_all(reader, self._call[0])
        yield from reader.skip_spaces()
        is_list = yield from reader.accept("[")
        yield from reader.skip_spaces()
        if is_list or (yield from reader.peek()) == "{":
            yield from self._read_objects(reader, output, is_callable)
        elif is_marked and self.marks.object is None:
            yield from self._read_named(reader, output, functions)
            reader.hold()
        else:
            raise Malformed
        yield from _skip_marks(reader, ("]",) * is_list + self._call[1] + self._section[1] + ("```",) * is_fenced)
        output.content(reader.release())

    def _read_objects(self, reader: Reader, output: ParsedOutput, is_callable: Callable[[str], bool]) -> Reading[None]:
        """Read objects, each with the marks behind it. Then the reader holds what follows."""
        has_more = True
        while has_more:
            yield from read_object_call(reader, output, is_callable, self._keys)
            reader.hold()
            yield from reader.skip_spaces()
            while (yield from reader.accept("}")):  # one too many
                reader.hold()
                yield from reader.skip_spaces()
            yield from _skip_marks(reader, self._call[1])
            for separator in (",", ";"):
                yield from reader.skip_spaces()
                yield from reader.accept(separator)
            yield from reader.skip_spaces()
            has_more = (yield from reader.peek()) == "{"

    def _read_named(self, reader: Reader, output: ParsedOutput, functions: Functions) -> Reading[None]:
        """Read a name and its arguments."""
        parts: list[str] = []
        yield from reader.run(_NAME_CHARACTERS, parts.append)
        name = "".join(parts).removeprefix(self._prefix)
        if not is_function_name(name) or not (yield from reader.peek()):
            raise Malformed
        layout = self.marks.parameters
        is_separated = yield from _accept_all(reader, self._middle_pieces)
        yield from reader.skip_spaces()
        if (yield from reader.peek()) == "{":
            yield from read_arguments(reader, output, name)
        elif layout is not None and is_separated:
            parameters = ParameterReader(output, name, functions.get(name, {}), layout)
            yield from self._read_parameters(reader, parameters, pieces(layout.opening))
        elif layout is None and self._call[1] and (yield from reader.accept(self._call[1][0])):
            output.begin_call(name)
            output.arguments("{}")
        else:
            raise Malformed
        output.end_call()

    def _read_parameters(self, reader: Reader, parameters: ParameterReader, opening: tuple[str, ...]) -> Reading[None]:
        """Read parameters up to one of the marks that end the call."""
        while True:
            yield from reader.skip_spaces()
            for piece in self._call[1]:
                if (yield from reader.accept(piece)):
                    parameters.end()
                    return
            for piece in opening:
                yield from reader.skip_spaces()
                yield from reader.expect(piece)
            yield from parameters.read(reader)


def _keys_of(before: str, middle: str) -> ObjectKeys:
    """Return the keys of an object with these texts before the name, and between it and the arguments."""
    usual, name, arguments = ObjectKeys(), _KEYS.findall(before), _KEYS.findall(middle)
    names = usual.names.union(name[-1:])
    return ObjectKeys(names, usual.arguments.union(arguments[-1:]), is_nested=not arguments)


def _accept_all(reader: Reader, marks: tuple[str, ...]) -> Reading[bool]:
    """Read the marks that come next, with spaces between them. Return whether the last of them was there."""
    has_last = not marks
    for mark in marks:
        yield from reader.skip_spaces()
        if mark == CALL_NUMBER:
            yield from reader.run(_ID_CHARACTERS, drop)
        else:
            has_last = yield from reader.accept(mark)
    return has_last


def _skip_marks(reader: Reader, marks: tuple[str, ...]) -> Reading[None]:
    """Read those of the marks that come next. Hold what follows them."""
    for mark in marks:
        yield from reader.skip_spaces()
        if (yield from reader.accept(mark)):
            reader.hold()
