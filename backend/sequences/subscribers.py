"""Who receives a sequence's tokens: its subscribers one by one, and what they have in common."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.backend.forward_pass import NOT_FINITE

if TYPE_CHECKING:
    from collections.abc import Iterator

_NO_TOKEN = frozenset([NOT_FINITE])


@dataclass(slots=True, eq=False)
class Subscriber:
    """One listener of a sequence, named by (frontend, request_id). It may end before the sequence does."""

    frontend: int
    request_id: int
    max_total_tokens: int
    """Limit on prompt and generated tokens together."""
    stop_token_ids: frozenset[int]
    next_index: int
    """Index in the sequence of the first token to send; the tokens before it came with the request."""
    arrived_s: float
    deadline_s: float | None = None
    num_logprobs: int = -1
    """Top log probabilities per generated token; -1 for none."""
    num_prompt_logprobs: int = -1
    """Top log probabilities per prompt token; -1 for none."""
    has_joined: bool = False
    """The sequence existed before this subscriber came."""
    is_started: bool = False
    """The first token was sent."""

    @property
    def is_scored(self) -> bool:
        """It receives log probabilities of its prompt's tokens."""
        return self.num_prompt_logprobs >= 0


class Subscribers:
    """The subscribers of one sequence, in order of arrival.

    A step's token takes the fast path if it is nothing but a token: it completes no page, every subscriber has
    started, and no subscriber stops at it. `settle` computes up to where that holds; each change undoes it.
    """

    __slots__ = (
        "_first_end",
        "_num_by_limit",
        "_subscribers",
        "common_stop_ids",
        "fast_path_until",
        "ids",
        "max_total_tokens",
        "stop_ids",
    )

    def __init__(self, first: Subscriber) -> None:
        self._subscribers: dict[Subscriber, None] = {}
        self._num_by_limit: Counter[int] = Counter()
        """Number of subscribers by max_total_tokens."""
        self._first_end = 0
        """Computed tokens after the step that brings a subscriber to its limit; 0 is unknown."""
        self.max_total_tokens = 0
        """Highest limit of all subscribers."""
        self.common_stop_ids: frozenset[int] = first.stop_token_ids
        """Tokens at which all subscribers stop. After a removal more may be common: that costs a row, never a token."""
        self.stop_ids: frozenset[int] = frozenset()
        """Tokens that force the slow delivery path: any subscriber's stop tokens and NOT_FINITE."""
        self.fast_path_until = 0
        """A step after which fewer tokens than this are computed brings a fast-path token."""
        self.ids: tuple[tuple[int, int], ...] = ()
        """(frontend, request id) of each subscriber; valid on the fast path."""
        self.add(first)

    def __iter__(self) -> Iterator[Subscriber]:
        return iter(self._subscribers)

    def __len__(self) -> int:
        return len(self._subscribers)

    def __contains__(self, subscriber: Subscriber) -> bool:
        return subscriber in self._subscribers

    def add(self, subscriber: Subscriber) -> None:
        self.common_stop_ids &= subscriber.stop_token_ids
        self._subscribers[subscriber] = None
        self._num_by_limit[subscriber.max_total_tokens] += 1
        self.max_total_tokens = max(self.max_total_tokens, subscriber.max_total_tokens)
        self.fast_path_until = self._first_end = 0

    def remove(self, subscriber: Subscriber) -> None:
        del self._subscribers[subscriber]
        self._num_by_limit[subscriber.max_total_tokens] -= 1
        if not self._num_by_limit[subscriber.max_total_tokens]:
            del self._num_by_limit[subscriber.max_total_tokens]
            if self._num_by_limit:
                self.max_total_tokens = max(self._num_by_limit)
        self.fast_path_until = self._first_end = 0

    def settle(self, next_page_end: int) -> None:
        """Allow the fast path after a token took the slow one, for steps that compute fewer than next_page_end tokens.
        0 keeps all tokens on the slow path."""
        if not self._first_end and all(subscriber.is_started for subscriber in self._subscribers):
            self._first_end = min(self._num_by_limit, default=1) - 1
            self.stop_ids = _NO_TOKEN.union(*(subscriber.stop_token_ids for subscriber in self._subscribers))
            self.ids = tuple((subscriber.frontend, subscriber.request_id) for subscriber in self._subscribers)
        self.fast_path_until = min(next_page_end, self._first_end)
