"""The receivers of a sequence's tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from penstock.backend.sequences.resumable_stream import ResumableChoice
from penstock.shm.link.events import Submission
from penstock.shm.messages import ArenaRef, Generate, Picture, Pooled, PromptHeader


@dataclass(frozen=True, slots=True)
class Prediction:
    """The quote of a running request, in seconds after its arrival, and its value before correction."""

    first_token_s: float
    modelled_first_token_s: float
    finish_s: float | None
    modelled_finish_s: float | None


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
    """Log probabilities per generated token beside its own; -1 for none."""
    has_joined: bool = False
    """The sequence existed before this subscriber came."""
    is_started: bool = False
    """The first token was sent."""
    tenant: bytes = b""
    """Owner of the request. The sequence is charged to the tenant of its first subscriber."""
    pooled: Pooled | None = None
    """The form of the vector that is its result."""
    resumed: Submission[Generate] | None = None
    """The request, until the sequence has caught up with the tokens that came with it."""
    reports_progress: bool = False
    """It receives how much of the prompt is computed, until its first token."""
    prediction: Prediction | None = None
    """Compared with the actual times; None for most requests."""
    pictures: tuple[Picture, ...] = ()
    read_pixels: Callable[[ArenaRef], memoryview] | None = None
    """Reads the pixels of its pictures, as long as it is open."""
    resumable: ResumableChoice | None = None
    """The part of the request that outlives its reader, if it lingers."""

    @classmethod
    def of(
        cls,
        submission: Submission[PromptHeader],
        arrived_s: float,
        max_total_tokens: int,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> Self:
        """The subscriber of a new request."""
        message, deadline_s = submission.message, submission.deadline_s(arrived_s)
        name, num_tokens = (submission.frontend, message.request_id), len(submission.tokens) // 4
        limits = max_total_tokens, stop_token_ids
        subscriber = cls(*name, *limits, num_tokens, arrived_s, deadline_s, tenant=message.tenant)
        if isinstance(message, Generate):
            subscriber.pictures, subscriber.read_pixels = message.pictures, submission.read_pixels
        return subscriber

    def contradicts(self, index: int, token_id: int) -> bool:
        """The token at index, which the sequence computed, is not the one that came with the request."""
        if self.resumed is None or index >= self.next_index:
            return False
        return self.resumed.tokens[4 * index : 4 * index + 4] != token_id.to_bytes(4, sys.byteorder, signed=True)


class Subscribers(dict[Subscriber, None]):
    """The subscribers of one sequence in order of arrival. `Sequence.subscribe` and `unsubscribe` change them."""

    __slots__ = ("_num_by_limit", "first_end")

    def __init__(self) -> None:
        self._num_by_limit: dict[int, int] = {}  # a Counter takes a microsecond to make
        """Number of subscribers by max_total_tokens."""
        self.first_end = 0
        """Computed tokens after the step that brings the first subscriber to its limit; 0 until all have started."""

    @property
    def max_total_tokens(self) -> int:
        """The highest limit of all subscribers."""
        return max(self._num_by_limit)

    def add(self, subscriber: Subscriber) -> None:
        self[subscriber] = None
        limit = subscriber.max_total_tokens
        self._num_by_limit[limit] = self._num_by_limit.get(limit, 0) + 1
        self.first_end = 0

    def remove(self, subscriber: Subscriber) -> None:
        del self[subscriber]
        self._num_by_limit[subscriber.max_total_tokens] -= 1
        if not self._num_by_limit[subscriber.max_total_tokens]:
            del self._num_by_limit[subscriber.max_total_tokens]
        self.first_end = 0

    def find_first_end(self) -> bool:
        """Set `first_end`. False if a subscriber has not started."""
        if not all(subscriber.is_started for subscriber in self):
            return False
        self.first_end = min(self._num_by_limit, default=1) - 1
        return True
