"""A sequence: tokens that are being computed."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from penstock.backend.sequences.kv_state import KvState
from penstock.backend.sequences.parking import Parking
from penstock.backend.sequences.subscribers import Subscribers

if TYPE_CHECKING:
    from penstock.backend.forward_pass import SamplingParams
    from penstock.backend.sequences.subscribers import Subscriber
    from penstock.backend.structured_output.constraints import SequenceConstraints
    from penstock.shm.buffers.buffer_export import Loan
    from penstock.shm.messages import EventLogprobs


class Sequence:
    """Tokens being computed. `num_computed` catches up with the known tokens and with those that launched steps sample.

    Steps are given the first `num_given_tokens` tokens. Each later token is the one that the slot sampled last, even if
    the main thread does not know it yet.

    Only the main thread writes, with one exception: the executor sets `stopped_generation` when a sampled token ends
    the sequence for all its subscribers, or a step of it fails. So rows that are already planned for it are dropped
    before the main thread knows.
    """

    __slots__ = (
        "constraints",
        "embeddings",
        "ended",
        "generation",
        "kept_logprobs",
        "kv",
        "needs_slot_init",
        "num_computed",
        "num_given_tokens",
        "num_prompt_tokens",
        "order",
        "output",
        "output_start",
        "parking",
        "queue_s",
        "rank",
        "salt",
        "sampling",
        "slot",
        "stopped_generation",
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
        # What is computed
        self.tokens = array("i")
        self.tokens.frombytes(tokens)
        self.num_prompt_tokens = num_prompt_tokens
        self.sampling = sampling
        self.salt = salt
        """Keeps tenants apart in the prefix cache."""
        self.constraints = constraints
        """Used by the executor's thread alone."""
        self.embeddings: Loan | None = None
        """The prompt, if it is given as embeddings. The link ends the loan with the request."""
        # What subscribers receive
        self.subscribers = Subscribers(subscriber)
        self.kept_logprobs: list[EventLogprobs] | None = None
        """Log probabilities of the generated tokens, for late joiners; None if nobody can join."""
        self.output: Loan | None = None
        """Buffer in which the only subscriber receives its logits. The link ends the loan with the request."""
        self.output_start = 0
        """Prompt tokens as the subscriber counts them; with a scored prompt more than num_prompt_tokens."""
        # Its turn
        self.rank = rank
        """Lower runs sooner and is preempted later."""
        self.order = -1
        """Order of arrival, which decides among equal ranks; set by `Scheduler.add`."""
        self.queue_s: float | None = None
        """Seconds from arrival to the first plan."""
        self.parking = Parking()
        # How far it is
        self.slot: int | None = None
        self.needs_slot_init = True
        """The next row must tell the pass which sequence the slot has."""
        self.kv = KvState()
        self.num_computed = 0
        """Tokens whose KV is computed by the steps launched so far."""
        self.num_given_tokens = len(self.tokens)
        """Tokens known at admission, or at the last rewind."""
        self.generation = 0
        """Counts rewinds and the end. Results of a step for an older generation are dropped."""
        self.stopped_generation = -1
        """The generation in which a token ended it for all subscribers, or a step of it failed."""
        self.ended = False
        """Removed from the scheduler: finished, cancelled, expired or failed."""

    def settle(self) -> None:
        """Allow the fast path after a token took the slow one. With log probabilities all tokens take the slow one."""
        self.subscribers.settle(0 if self.sampling.num_logprobs >= 0 else self.kv.next_page_end)

    @property
    def num_applied(self) -> int:
        """Tokens whose KV is computed by applied steps: it stays in its pages."""
        return len(self.tokens) - 1 if len(self.tokens) > self.num_given_tokens else self.kv.num_prefilled

    def restart(self) -> None:
        """Start over after preemption. Results of steps in flight are dropped; the caller has released the pages."""
        self.slot = None
        self.kv.clear()
        self.parking.restart()
        self.rewind(0)

    def rewind(self, num_computed: int) -> None:
        """Drop the results of steps in flight. The pages hold the KV of the first num_computed tokens."""
        self.num_computed = self.kv.num_prefilled = num_computed
        self.num_given_tokens = len(self.tokens)
        self.subscribers.fast_path_until = 0
        self.needs_slot_init = True
        self.generation += 1
