"""What a grammar costs in use: the time of its masks, and the memory of the states that its lexer keeps.

Imports llguidance for type checking only, so the steps of requests without grammars do not need it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

_SLOW_NS = 2_000_000
"""A mask that takes longer is not filled within a step."""
_NUM_UNTIL_QUICK = 16
"""Quick masks and tokens after a slow one until masks are filled within steps again."""
_READ_AFTER_NS = 5_000_000
"""The lexer's work is read again after masks and tokens that took so long together. Reading takes 0.04 to 0.4 ms."""
_BYTES_PER_LEXER_COST = 32
"""Memory of new states per unit of the lexer's work. Measured: 7 to 26, and 67 where it is little (0.5 MB)."""
_NS_PER_BYTE = 4
"""Masks take at least so long per byte of new states."""
_LEXER_COST = re.compile(r'"lexer_cost": (\d+)')
_TOO_MANY_TOKENS = 1 << 30
MAX_ERROR_CHARACTERS = 300


class Pace:
    """Whether the masks of a grammar take long. All its sequences share one, as they share llguidance's lexer, which is
    locked while a mask is filled.

    Threads may write at the same time: a note that is lost costs a step, never a token.
    """

    def __init__(self) -> None:
        self._num_until_quick = 0

    @property
    def is_slow(self) -> bool:
        return self._num_until_quick > 0

    def note(self, spent_ns: int) -> None:
        """Note the time of a mask, or of taking in a token."""
        if spent_ns >= _SLOW_NS:
            self._num_until_quick = _NUM_UNTIL_QUICK
        elif self._num_until_quick and spent_ns < _SLOW_NS // 2:
            self._num_until_quick -= 1


class Growth:
    """How much memory a grammar has taken in use: its lexer keeps the states that masks and tokens needed. All copies
    share the lexer, its states and their limit.

    An estimate: the lexer's work as of the last reading, and since then as much as the time may have made. Threads may
    write at the same time: a note that is lost delays the next reading.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._read_bytes = 0
        self.is_spent = False
        """A copy has failed. If that was for the number of states, every other copy fails soon."""
        self._first_cost = 0
        self._unread_ns = 0

    def start(self, matcher: LLMatcher) -> None:
        """The grammar has been compiled, and its first mask filled: what it has taken until now does not count."""
        self._first_cost = _lexer_cost(matcher)

    def note(self, spent_ns: int, matcher: LLMatcher) -> None:
        """Note the time of a mask that this copy has filled. Now and then this reads the lexer's work, which no mask
        adds to whose states are known: time alone would charge a schema that many requests use."""
        self._unread_ns += spent_ns
        if self._unread_ns >= _READ_AFTER_NS:
            self._unread_ns = 0
            cost = _lexer_cost(matcher) - self._first_cost
            self._read_bytes = max(self._read_bytes, cost * _BYTES_PER_LEXER_COST)
        self.num_bytes = self._read_bytes + self._unread_ns // _NS_PER_BYTE


def _lexer_cost(matcher: LLMatcher) -> int:
    """The work of the lexer that the matcher shares with its copies, until the last mask for which it had to work here.
    llguidance tells it in the text of an error only."""
    spare = matcher.deep_copy()
    spare.rollback(_TOO_MANY_TOKENS)
    found = _LEXER_COST.search(spare.get_error())
    return int(found[1]) if found is not None else 0


def error_of(matcher: LLMatcher) -> str:
    """Why the matcher has failed, in one line without its grammar."""
    return one_line(matcher.get_error().partition("\n<state>")[0])


def one_line(message: str) -> str:
    """One line of bounded length: the client's own text may be part of it."""
    return " ".join(message.split())[:MAX_ERROR_CHARACTERS]
