"""Requests that wait for their quote: a turn of the loop makes a few, so that many never hold up the next step."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backend.structured_output.compile_grammar import CompiledGrammar
    from penstock.shm.link.events import Submission
    from penstock.shm.messages import AskQuote, Generate

_MAX_TOKENS = 1 << 15
"""Prompt tokens after which a turn makes no further quote: all are hashed to find the cached ones."""


@dataclass(frozen=True, slots=True)
class WaitingForQuote:
    submission: Submission[AskQuote] | Submission[Generate]
    arrived_s: float
    deadline_s: float | None
    grammar: CompiledGrammar | None = None
    """The request's own copy."""

    @property
    def key(self) -> tuple[int, int]:
        return self.submission.frontend, self.submission.request_id


class QuoteQueue:
    """Owned by `RequestTable`. Tenants take turns, one request each, in the order of arrival."""

    def __init__(self, max_quotes: int = 16) -> None:
        """max_quotes are made in a turn of the loop."""
        self._max_quotes = max_quotes
        self._waiting: dict[tuple[int, int], WaitingForQuote] = {}
        self._lines: OrderedDict[bytes, OrderedDict[tuple[int, int], WaitingForQuote]] = OrderedDict()
        """By tenant; the first one is next."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_of(self) -> Counter[bytes]:
        """Waiting requests by tenant, without tenants that have none."""
        return Counter({tenant: len(line) for tenant, line in self._lines.items()})

    def find(self, frontend: int, request_id: int) -> WaitingForQuote | None:
        return self._waiting.get((frontend, request_id))

    def add(self, waiting: WaitingForQuote) -> None:
        self._waiting[waiting.key] = waiting
        self._lines.setdefault(waiting.submission.message.tenant, OrderedDict())[waiting.key] = waiting

    def remove(self, frontend: int, request_id: int) -> bool:
        """Return whether the request waited here."""
        if (waiting := self._waiting.pop((frontend, request_id), None)) is None:
            return False
        tenant = waiting.submission.message.tenant
        del self._lines[tenant][waiting.key]
        if not self._lines[tenant]:
            del self._lines[tenant]
        return True

    def remove_frontend(self, frontend: int) -> int:
        """Remove all requests of the frontend and return how many waited here."""
        return sum(self.remove(*key) for key in [key for key in self._waiting if key[0] == frontend])

    def take_turn(self) -> Iterator[WaitingForQuote]:
        """Remove the requests that this turn of the loop quotes, at least one if any waits."""
        num_tokens = 0
        for _ in range(min(self._max_quotes, len(self._waiting))):
            tenant, line = next(iter(self._lines.items()))
            waiting = next(iter(line.values()))
            self.remove(*waiting.key)
            if line:
                self._lines.move_to_end(tenant)
            yield waiting
            num_tokens += waiting.submission.message.num_prompt_tokens
            if num_tokens >= _MAX_TOKENS:
                break
