"""Measures the costs of grammars in use: time for masks, and memory for their lexers and for each stream's parser.

Imports llguidance for type checking only, so the steps of requests without grammars do not need it.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

from penstock.process.admission import TenantPlaces

if TYPE_CHECKING:
    from llguidance import LLMatcher

_SLOW_NS = 2_000_000
"""A mask that takes longer is not filled within a step."""
_NUM_UNTIL_QUICK = 16
"""Number of quick masks and tokens after a slow one before masks are filled within steps again."""
_READ_AFTER_NS = 5_000_000
"""Memory is measured again after this much time for masks.

A measurement takes 0.04 to 0.4 ms, and more for a stream with a large parser.
"""
_NUM_READING_TIMES = 16
"""At the earliest, memory is measured after masks that took this many times as long as the last measurement."""
_BYTES_PER_LEXER_COST = 32
"""Memory of new states per unit of the lexer's work. Measured: 7 to 26, and 67 where it is little (0.5 MB)."""
_NS_PER_BYTE = 4
"""Masks take at least this long per byte of new states."""
_COPIED_BYTES_PER_NS = 32
"""Upper bound of a parser's bytes per nanosecond of copying. Measured: 2 to 4, and 21 into memory just freed."""
_MAX_TOTAL_BYTES = 1 << 30
_MAX_PARSER_BYTES = 64 << 20
"""Memory that one stream's parser may take. A copy measures it and holds the GIL: 4 ms at this limit."""
_LEXER_COST = re.compile(r'"lexer_cost": (\d+)')
_QUOTED_LINES = re.compile(r"\n +\d+ \| .*", re.DOTALL)
"""Lines of the grammar, most of which the client did not write."""
_SCHEMA_PLACE = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
_TOO_MANY_TOKENS = 1 << 30
MAX_ERROR_CHARACTERS = 300


class BadGrammar(Exception):
    """The grammar does not compile within the limits. The text explains why, in one line."""


class Pace:
    """Whether the masks of a grammar take long.

    All its sequences share one, as they share llguidance's lexer, which is locked while a mask is filled. Threads may
    write at the same time: a lost note costs a step, never a token.
    """

    def __init__(self) -> None:
        self._num_until_quick = 0

    @property
    def is_slow(self) -> bool:
        return self._num_until_quick > 0

    def note(self, spent_ns: int) -> None:
        """Note the time of a mask, or of consuming a token."""
        if spent_ns >= _SLOW_NS:
            self._num_until_quick = _NUM_UNTIL_QUICK
        elif self._num_until_quick and spent_ns < _SLOW_NS // 2:
            self._num_until_quick -= 1


class GrammarMemoryFull(Exception):
    """The text names the limit."""


class GrammarMemory:
    """The memory of all grammars that are cached or in use, by tenant. Safe for threads.

    Together they take up to limit_bytes. Beyond that only tenants with less than their share get more, up to twice as
    much in all (`tenant_places`).
    """

    def __init__(self, limit_bytes: int = _MAX_TOTAL_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._places = TenantPlaces(limit_bytes)
        self._lock = threading.Lock()
        """Guards _places."""
        self._given_back: deque[Counter[bytes]] = deque()
        """Released later: the garbage collector may run `give_back` in a thread that has the lock."""

    @property
    def num_bytes(self) -> int:
        with self._lock:
            self._release_given_back()
            return self._places.num_taken

    def resize(self, held: Counter[bytes], num_bytes: int, tenant: bytes) -> None:
        """Change the held memory, by tenant, to num_bytes in all. The difference is the tenant's.

        Raises GrammarMemoryFull, and then nothing has changed.
        """
        with self._lock:
            self._release_given_back()
            num_more = num_bytes - held.total()
            if num_more > 0:
                if not self._places.has(tenant, num_more):
                    raise GrammarMemoryFull(
                        f"all grammars in use together take more memory than the limit of {self.limit_bytes >> 20} MiB"
                    )
                self._places.take(tenant, num_more)
            elif num_less := min(-num_more, held[tenant]):
                self._places.release(tenant, num_less)
            held[tenant] += max(num_more, -held[tenant])

    def give_back(self, held: Counter[bytes]) -> None:
        self._given_back.append(held)

    def _release_given_back(self) -> None:
        while self._given_back:
            for tenant, num_bytes in self._given_back.popleft().items():
                if num_bytes:
                    self._places.release(tenant, num_bytes)


_UNLIMITED = GrammarMemory(1 << 62)


class _Holding:
    """A part of a `GrammarMemory`, given back when its owner is gone."""

    def __init__(self, memory: GrammarMemory) -> None:
        self._memory = memory
        self._held: Counter[bytes] = Counter()

    def resize(self, num_bytes: int, tenant: bytes) -> None:
        """See `GrammarMemory.resize`."""
        self._memory.resize(self._held, num_bytes, tenant)

    def __del__(self) -> None:
        self._memory.give_back(self._held)


class Growth:
    """How much memory a grammar has taken in use: its lexer keeps the states that masks and tokens needed.

    All copies share the lexer, its states and their limit. The value is an estimate: the lexer's work at the last
    measurement, plus the most that the time since then can have added. Threads may write at the same time: a lost note
    delays the next measurement.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        """Without the compiled grammar."""
        self.is_spent = False
        """A copy has failed. If that was for the number of states, every other copy fails soon."""
        self.memory = _UNLIMITED
        """Counts it after `charge`."""
        self._holding = _Holding(self.memory)
        self._compiled_bytes = 0
        self._read_bytes = 0
        self._first_cost = 0
        self._unread_ns = 0

    def start(self, matcher: LLMatcher) -> None:
        """Start counting: the grammar has been compiled, and its first mask filled. Memory taken before
        does not count."""
        self._first_cost = _measure(matcher).lexer_cost

    def charge(self, compiled_bytes: int, memory: GrammarMemory, tenant: bytes) -> None:
        """Count the grammar in the memory from now on; the tenant pays for it as compiled. Raises GrammarMemoryFull."""
        if self.memory is not memory:
            holding = _Holding(memory)
            holding.resize(compiled_bytes, tenant)
            self.memory, self._holding, self._compiled_bytes = memory, holding, compiled_bytes

    def note(self, spent_ns: int) -> int:
        """Note the time of a mask. Return the time of masks since the last measurement."""
        self._unread_ns = unread_ns = self._unread_ns + spent_ns
        self.num_bytes = self._read_bytes + unread_ns // _NS_PER_BYTE
        return unread_ns

    def note_cost(self, lexer_cost: int, tenant: bytes) -> None:
        """Note the lexer's work; the tenant pays for new states.

        A mask whose states are known adds nothing: charging time would charge a schema that many requests use. Raises
        GrammarMemoryFull.
        """
        self._unread_ns = 0
        self._read_bytes = max(self._read_bytes, (lexer_cost - self._first_cost) * _BYTES_PER_LEXER_COST)
        self.num_bytes = self._read_bytes
        self._holding.resize(self._compiled_bytes + self._read_bytes, tenant)


class StreamGrowth:
    """The memory that one stream's use of a grammar takes: its own parser, and its additions to the lexer."""

    def __init__(self, grammar: Growth, tenant: bytes) -> None:
        self._grammar = grammar
        self._tenant = tenant
        self._holding = _Holding(grammar.memory)
        self._unread_ns = 0
        self._read_after_ns = _READ_AFTER_NS

    def note_failure(self) -> None:
        self._grammar.is_spent = True

    def note(self, spent_ns: int, matcher: LLMatcher) -> None:
        """Note the time of a mask that the stream's matcher has filled. Raises GrammarMemoryFull."""
        self._unread_ns += spent_ns
        if max(self._unread_ns, self._grammar.note(spent_ns)) < self._read_after_ns:
            return
        began_ns = time.thread_time_ns()
        found = _measure(matcher)
        self._unread_ns = 0
        self._read_after_ns = max(_READ_AFTER_NS, _NUM_READING_TIMES * (time.thread_time_ns() - began_ns))
        parser_bytes = found.parser_bytes
        if parser_bytes > _MAX_PARSER_BYTES:  # perhaps the kernel delayed this thread: measure again
            parser_bytes = min(parser_bytes, _measure(matcher).parser_bytes)
        if parser_bytes > _MAX_PARSER_BYTES:
            raise GrammarMemoryFull(f"its parser takes more memory than the limit of {_MAX_PARSER_BYTES >> 20} MiB")
        self._grammar.note_cost(found.lexer_cost, self._tenant)
        self._holding.resize(parser_bytes, self._tenant)


class _Measured(NamedTuple):
    lexer_cost: int
    """The work of the lexer that the matcher shares with its copies, until the last mask for which it had to work
    here."""
    parser_bytes: int
    """Memory of the matcher itself, estimated from the time that a copy takes."""


def _measure(matcher: LLMatcher) -> _Measured:
    """Measure the matcher. llguidance reports the lexer's work only in the text of an error, and never the parser's
    memory."""
    began_ns = time.thread_time_ns()
    spare = matcher.deep_copy()
    parser_bytes = (time.thread_time_ns() - began_ns) * _COPIED_BYTES_PER_NS
    spare.rollback(_TOO_MANY_TOKENS)
    found = _LEXER_COST.search(spare.get_error())
    return _Measured(int(found[1]) if found is not None else 0, parser_bytes)


def error_of(matcher: LLMatcher) -> str:
    """Why the matcher has failed, in one line without its grammar."""
    reason = matcher.get_error().partition("\n<state>")[0]
    return one_line(_SCHEMA_PLACE.sub("", _QUOTED_LINES.sub("", reason)))


def one_line(message: str) -> str:
    """One line of bounded length: the client's own text may be part of it."""
    return " ".join(message.split())[:MAX_ERROR_CHARACTERS]
