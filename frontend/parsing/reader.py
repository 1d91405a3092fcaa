"""Reads a text that arrives in pieces as if it were whole: a reading pauses until the text that it needs has arrived.

Parsers built on it do not see the pieces, so they parse any split of a text the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from re import Pattern
from typing import TypeVar

_Result = TypeVar("_Result")
Reading = Generator[None, None, _Result]
"""A reading in progress. Resume it when more text or the end has come; `yield from` returns its result."""

SPACES = " \t\r\n"


class Malformed(Exception):
    """The next text is not what the reading expects. That text stays unread."""


class Reader:
    """A text, and the position up to which it is read.

    After `hold`, the text that is read is kept. `release` returns it if it turns out to be something else.
    """

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._ended = False
        self._is_holding = False
        self._held: list[str] = []
        self._held_from = 0

    def push(self, text: str) -> None:
        if self._is_holding:
            self._held.append(self._text[self._held_from : self._position])
            self._held_from = 0
        self._text = self._text[self._position :] + text
        self._position = 0

    def end(self) -> None:
        """No more text will come."""
        self._ended = True

    @property
    def num_read(self) -> int:
        """Characters read of the text that was pushed last."""
        return self._position

    def hold(self) -> None:
        """Hold from here on. Forgets what was held before."""
        self._is_holding = True
        self._held.clear()
        self._held_from = self._position

    def release(self) -> str:
        """Return the text read since `hold` and stop holding. Empty if nothing is held."""
        if not self._is_holding:
            return ""
        held = "".join((*self._held, self._text[self._held_from : self._position]))
        self._is_holding = False
        self._held.clear()
        return held

    def peek(self) -> Reading[str]:
        """Return the next character without reading it; empty at the end."""
        while self._position == len(self._text) and not self._ended:
            yield
        return self._text[self._position : self._position + 1]

    def next(self) -> Reading[str]:
        """Read the next character. Raises Malformed at the end."""
        character = yield from self.peek()
        if not character:
            raise Malformed
        self._position += 1
        return character

    def accept(self, literal: str) -> Reading[bool]:
        """Read the literal if it comes next. Otherwise read nothing."""
        while True:
            available = self._text[self._position : self._position + len(literal)]
            if available == literal:
                self._position += len(literal)
                return True
            if self._ended or not literal.startswith(available):
                return False
            yield

    def expect(self, literal: str) -> Reading[None]:
        """Read the literal. Raises Malformed if something else comes next."""
        if not (yield from self.accept(literal)):
            raise Malformed

    def run(self, pattern: Pattern[str], emit: Callable[[str], object]) -> Reading[None]:
        """Read and emit all characters that match. The pattern must be one repeated character class."""
        while (yield from self.peek()):
            match = pattern.match(self._text, self._position)
            if match is None or match.end() == self._position:
                return
            self._position = match.end()
            emit(match[0])

    def skip_spaces(self) -> Reading[None]:
        while (character := (yield from self.peek())) and character in SPACES:
            self._position += 1

    def until(self, marker: str, emit: Callable[[str], object], *, keeps_partial: bool = True) -> Reading[bool]:
        """Emit the text before the marker, and stop there. Return False if the text ends without the marker.

        If the text ends within the marker, keeps_partial emits that part of it; otherwise it is dropped.
        """
        return (yield from self.until_any((marker,), emit, keeps_partial=keeps_partial)) is not None

    def until_any(
        self, markers: tuple[str, ...], emit: Callable[[str], object], *, keeps_partial: bool = True
    ) -> Reading[str | None]:
        """Emit the text before the first of the markers, and stop there. Return that marker; None if the text ends
        without any. No marker may contain another."""
        while True:
            starts = {self._text.find(marker, self._position): marker for marker in markers}
            starts.pop(-1, None)
            start = min(starts, default=None)
            end = len(self._text) if start is None else start
            if start is None and not (self._ended and keeps_partial):
                end -= max(map(self._num_doubtful, markers))
            if end > self._position:
                emit(self._text[self._position : end])
                self._position = end
            if start is not None:
                return starts[start]
            if self._ended:
                self._position = len(self._text)
                return None
            yield

    def rest(self, emit: Callable[[str], object]) -> Reading[None]:
        """Emit everything up to the end."""
        while (yield from self.peek()):
            emit(self._text[self._position :])
            self._position = len(self._text)

    def _num_doubtful(self, marker: str) -> int:
        """Number of characters at the end that may be the beginning of the marker."""
        longest = min(len(marker) - 1, len(self._text) - self._position)
        return next((length for length in range(longest, 0, -1) if self._text.endswith(marker[:length])), 0)
