"""A text that comes in pieces, read as if it were whole: a reading waits where it needs what has not come yet.

So the readings know nothing of pieces, and any split of a text is read alike.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from re import Pattern

_Result = TypeVar("_Result")
Reading = Generator[None, None, _Result]
"""A reading under way. Run it on when more text has come, or the end; `yield from` gives its result."""

SPACES = " \t\r\n"


class Malformed(Exception):
    """What comes next is not what the reading expects. It has not been read."""


class Reader:
    """What is read while `hold` is on can be had back with `release`: text that turned out to be something else."""

    def __init__(self) -> None:
        self._text = ""
        self._place = 0
        self._ended = False
        self._is_holding = False
        self._held: list[str] = []
        self._held_from = 0

    def push(self, text: str) -> None:
        if self._is_holding:
            self._held.append(self._text[self._held_from : self._place])
            self._held_from = 0
        self._text = self._text[self._place :] + text
        self._place = 0

    def end(self) -> None:
        """No more text will come."""
        self._ended = True

    def hold(self) -> None:
        """From here on. What was held before is forgotten."""
        self._is_holding = True
        self._held.clear()
        self._held_from = self._place

    def release(self) -> str:
        """What was read since `hold`; nothing where that is off, as it is afterwards."""
        if not self._is_holding:
            return ""
        held = "".join((*self._held, self._text[self._held_from : self._place]))
        self._is_holding = False
        self._held.clear()
        return held

    def peek(self) -> Reading[str]:
        """The next character, unread; nothing at the end."""
        while self._place == len(self._text) and not self._ended:
            yield
        return self._text[self._place : self._place + 1]

    def next(self) -> Reading[str]:
        """The next character. Raises Malformed at the end."""
        character = yield from self.peek()
        if not character:
            raise Malformed
        self._place += 1
        return character

    def accept(self, literal: str) -> Reading[bool]:
        """Reads the literal if it comes next, and else nothing."""
        while True:
            there = self._text[self._place : self._place + len(literal)]
            if there == literal:
                self._place += len(literal)
                return True
            if self._ended or not literal.startswith(there):
                return False
            yield

    def expect(self, literal: str) -> Reading[None]:
        """Raises Malformed."""
        if not (yield from self.accept(literal)):
            raise Malformed

    def run(self, pattern: Pattern[str], emit: Callable[[str], object]) -> Reading[None]:
        """Reads and passes on as many characters as the pattern, one of a single repeated class, matches."""
        while (yield from self.peek()):
            match = pattern.match(self._text, self._place)
            if match is None or match.end() == self._place:
                return
            self._place = match.end()
            emit(match[0])

    def skip_spaces(self) -> Reading[None]:
        while (character := (yield from self.peek())) and character in SPACES:
            self._place += 1

    def until(self, marker: str, emit: Callable[[str], object]) -> Reading[bool]:
        """Passes text on up to the marker, which stays unread; False at the end without one."""
        while True:
            start = self._text.find(marker, self._place)
            end = start if start >= 0 else len(self._text) - self._num_doubtful(marker)
            if end > self._place:
                emit(self._text[self._place : end])
                self._place = end
            if start >= 0:
                return True
            if self._ended:
                return False
            yield

    def rest(self, emit: Callable[[str], object]) -> Reading[None]:
        """All that is still to come."""
        while (yield from self.peek()):
            emit(self._text[self._place :])
            self._place = len(self._text)

    def _num_doubtful(self, marker: str) -> int:
        """Characters at the end of what is there that may be the marker's first ones."""
        if self._ended:
            return 0
        longest = min(len(marker) - 1, len(self._text) - self._place)
        return next((length for length in range(longest, 0, -1) if self._text.endswith(marker[:length])), 0)
