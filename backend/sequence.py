"""A sequence is tokens being computed; a subscriber is who gets them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backend.forward_pass import SamplingParams


@dataclass(frozen=True, slots=True)
class Subscriber:
    """One listener of a sequence. (frontend, request_id) names it; the ends are its own, not the sequence's."""

    frontend: int
    request_id: int
    max_tokens: int
    stop_token_ids: frozenset[int]


class Sequence:
    """Tokens being computed. `num_computed` catches up with `num_planned`; nothing says prefill or decode.

    The main thread alone writes, with one exception: the executor sets `stopped_generation` when a sampled token ends
    the sequence, so that a row already planned for it is dropped before the main thread knows.
    """

    __slots__ = (
        "arrived_s",
        "ended",
        "generation",
        "is_started",
        "max_total_tokens",
        "num_computed",
        "num_pending",
        "num_prompt_tokens",
        "pages",
        "queue_s",
        "sampling",
        "slot",
        "stopped_generation",
        "subscriber",
        "tokens",
    )

    def __init__(
        self,
        subscriber: Subscriber,
        tokens: bytes,
        num_prompt_tokens: int,
        sampling: SamplingParams,
        max_context_tokens: int,
        arrived_s: float,
    ) -> None:
        # For life.
        self.subscriber = subscriber
        self.sampling = sampling
        self.num_prompt_tokens = num_prompt_tokens
        self.max_total_tokens = min(num_prompt_tokens + subscriber.max_tokens, max_context_tokens)
        self.arrived_s = arrived_s
        self.tokens = array("i")
        self.tokens.frombytes(tokens)
        self.is_started = False
        """Its first token was delivered."""
        self.queue_s = 0.0
        # Until preempted or ended.
        self.slot: int | None = None
        self.pages: list[int] = []
        self.num_computed = 0
        """Tokens whose KV is computed by steps launched so far."""
        self.num_pending = 0
        """Tokens that launched steps will sample, not yet known here."""
        self.generation = 0
        """Counts preemptions: what a step brings for an older generation is dropped."""
        self.stopped_generation = -1
        """The generation in which a stop token was sampled."""
        self.ended = False
        """Removed from the scheduler: finished, cancelled or failed."""

    @property
    def num_planned(self) -> int:
        """Tokens known or about to be."""
        return len(self.tokens) + self.num_pending

    @property
    def num_to_compute(self) -> int:
        """Tokens that the next step may compute. The last token of all is never computed: nothing follows it."""
        return min(self.num_planned, self.max_total_tokens - 1) - self.num_computed

    def restart(self) -> None:
        """After preemption: everything is computed again; steps in flight no longer count."""
        self.slot = None
        self.pages = []
        self.num_computed = 0
        self.num_pending = 0
        self.generation += 1
