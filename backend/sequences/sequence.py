"""A sequence is tokens being computed; subscribers are who gets them."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.backend.forward_pass import NOT_FINITE

if TYPE_CHECKING:
    from penstock.backend.forward_pass import SamplingParams
    from penstock.backend.structured_output.constraints import SequenceConstraints
    from penstock.shm.buffers.buffer_export import Loan
    from penstock.shm.messages import EventLogprobs

_NO_TOKEN = frozenset([NOT_FINITE])


@dataclass(slots=True, eq=False)
class Subscriber:
    """One listener of a sequence, named by (frontend, request_id). Its end is its own affair, not the sequence's."""

    frontend: int
    request_id: int
    max_total_tokens: int
    """Prompt and generated tokens after which it has had enough."""
    stop_token_ids: frozenset[int]
    next_index: int
    """Index in the sequence of the first token it is to get: what it brought along lies before."""
    arrived_s: float
    deadline_s: float | None = None
    num_logprobs: int = -1
    """Of the likeliest tokens that it is told with each of its own; -1 is no log probabilities."""
    num_prompt_logprobs: int = -1
    """The same for the tokens that it brought along."""
    has_joined: bool = False
    """It came to a sequence that was there already."""
    is_started: bool = False
    """It has had its first token."""

    @property
    def is_scored(self) -> bool:
        """It is told of its prompt's tokens as well."""
        return self.num_prompt_logprobs >= 0


class Sequence:
    """Tokens being computed. `num_computed` catches up with those that there are and those that launched steps sample.

    The first `num_given_tokens` tokens are known here, and are given to the steps; each later one is the one that the
    sequence's slot sampled last, known here or not.

    The main thread alone writes, with one exception: the executor sets `stopped_generation` when a sampled token ends
    the sequence for all its subscribers, or a fault does, so that a row already planned for it is dropped before the
    main thread knows.
    """

    __slots__ = (
        "_first_limit",
        "_totals",
        "capacity_tokens",
        "common_stop_ids",
        "constraints",
        "embeddings",
        "ended",
        "fast_path_until",
        "generation",
        "has_suspect_kv",
        "logprobs",
        "max_total_tokens",
        "needs_slot_init",
        "next_page_end",
        "num_available",
        "num_cached",
        "num_computed",
        "num_given_tokens",
        "num_indexed_pages",
        "num_prefilled",
        "num_prompt_tokens",
        "order",
        "output",
        "output_start",
        "page_hashes",
        "pages",
        "park_deadline_step",
        "queue_s",
        "rank",
        "salt",
        "sampling",
        "slot",
        "stop_ids",
        "stopped_generation",
        "subscriber_ids",
        "subscribers",
        "tokens",
    )

    def __init__(
        self,
        subscriber: Subscriber,
        tokens: bytes,
        num_prompt_tokens: int,
        sampling: SamplingParams,
        *,
        salt: bytes = b"",
        rank: float = 0.0,
        constraints: SequenceConstraints | None = None,
    ) -> None:
        # For life.
        self.num_prompt_tokens = num_prompt_tokens
        self.sampling = sampling
        self.salt = salt
        self.constraints = constraints
        """The executor's alone."""
        self.logprobs: list[EventLogprobs] | None = None
        """Of the tokens generated here, where a listener may come late and is to be told them too."""
        self.embeddings: Loan | None = None
        """Its prompt, where that is no tokens; ended by the link, with the request."""
        self.output: Loan | None = None
        """Where its one subscriber wants its logits; ended by the link, with the request."""
        self.output_start = 0
        """Tokens of the prompt as its subscriber knows it, of which some may be forced here."""
        self.rank = rank
        """Lower runs sooner and is preempted later."""
        self.order = -1
        """Its place in the order of arrival, which decides among equal ranks; set by the scheduler as it is added."""
        self.tokens = array("i")
        self.tokens.frombytes(tokens)
        self.page_hashes: list[bytes] = []
        """Of its full pages, as far as they were needed yet."""
        self.queue_s: float | None = None
        """Seconds from arrival to its first plan."""
        # As subscribers come and go.
        self.subscribers: dict[Subscriber, None] = {}
        """In order of arrival."""
        self._totals: Counter[int] = Counter()
        self.max_total_tokens = 0
        self.common_stop_ids: frozenset[int] = frozenset()
        """Those at which all stop."""
        self.stop_ids: frozenset[int] = frozenset()
        """What the next token must not be to be a mere token: one at which a listener stops, or none at all."""
        self.fast_path_until = 0
        """A step after which fewer tokens than this are computed brings a mere token: it completes no page, all
        subscribers have begun, and none comes to its limit. See `settle`."""
        self._first_limit = 0
        """The same as far as limits go; 0 where it is to be found out anew."""
        self.subscriber_ids: tuple[tuple[int, int], ...] = ()
        """(frontend, request id) of those who are told a mere token."""
        self.subscribe(subscriber)
        # While it waits for what another is computing.
        self.num_available = -1
        """Of its tokens, how many it need not compute."""
        self.park_deadline_step = 0
        """The plan until which that must have become more."""
        # Until preempted or ended.
        self.slot: int | None = None
        self.needs_slot_init = True
        """The pass must be told, with the next row, which sequence its slot now has."""
        self.pages: list[int] = []
        self.capacity_tokens = 0
        """Tokens whose KV its pages hold."""
        self.num_cached = 0
        """Tokens whose KV was there already when it was admitted."""
        self.has_suspect_kv = False
        """What its pages hold may be bad, and is nobody else's."""
        self.num_prefilled = 0
        """Of what it brought, the tokens whose KV is computed by steps that have been applied."""
        self.num_indexed_pages = 0
        """Its first pages whose content is complete and named in the pool."""
        self.next_page_end = 0
        """Tokens that complete the next page."""
        self.num_computed = 0
        """Tokens whose KV is computed by steps launched so far."""
        self.num_given_tokens = len(self.tokens)
        """Tokens known when it took its slot."""
        self.generation = 0
        """Counts restarts, and its end: what a step brings for an older generation is dropped."""
        self.stopped_generation = -1
        """The generation in which a token was sampled that ends it for all, or a step of it failed."""
        self.ended = False
        """Removed from the scheduler: finished, cancelled, expired or failed."""

    def subscribe(self, subscriber: Subscriber) -> None:
        self.common_stop_ids = (
            self.common_stop_ids & subscriber.stop_token_ids if self.subscribers else subscriber.stop_token_ids
        )
        self.subscribers[subscriber] = None
        self._totals[subscriber.max_total_tokens] += 1
        self.max_total_tokens = max(self.max_total_tokens, subscriber.max_total_tokens)
        self.fast_path_until = self._first_limit = 0

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """What is common to those that stay may be more than is noted: that may cost a row, never a token."""
        del self.subscribers[subscriber]
        self._totals[subscriber.max_total_tokens] -= 1
        if not self._totals[subscriber.max_total_tokens]:
            del self._totals[subscriber.max_total_tokens]
            if self._totals:
                self.max_total_tokens = max(self._totals)
        self.fast_path_until = self._first_limit = 0

    def settle(self) -> None:
        """A token has been looked at closely; notes up to where the next ones need not be, if nothing changes."""
        if not self._first_limit and all(subscriber.is_started for subscriber in self.subscribers):
            self._first_limit = min(self._totals, default=1) - 1
            self.stop_ids = _NO_TOKEN.union(*(subscriber.stop_token_ids for subscriber in self.subscribers))
            self.subscriber_ids = tuple((subscriber.frontend, subscriber.request_id) for subscriber in self.subscribers)
        is_told_more = self.sampling.num_logprobs >= 0
        self.fast_path_until = 0 if is_told_more else min(self.next_page_end, self._first_limit)

    @property
    def num_applied(self) -> int:
        """Tokens whose KV is computed by steps that have been applied: it stands in its pages for good."""
        return len(self.tokens) - 1 if len(self.tokens) > self.num_given_tokens else self.num_prefilled

    def restart(self) -> None:
        """After preemption: pages are found again or computed again; steps in flight no longer count."""
        self.slot = None
        self.pages = []
        self.capacity_tokens = 0
        self.num_cached = 0
        self.num_indexed_pages = 0
        self.num_available = -1
        self.has_suspect_kv = False
        self.rewind(0)

    def rewind(self, num_computed: int) -> None:
        """Steps in flight no longer count; what stands in its pages is the KV of its first num_computed tokens."""
        self.num_computed = self.num_prefilled = num_computed
        self.num_given_tokens = len(self.tokens)
        self.fast_path_until = 0
        self.needs_slot_init = True
        self.generation += 1
