"""A sequence: tokens that are being computed, and its pages."""

from __future__ import annotations

import sys
from array import array

from penstock.backend.forward_pass import NO_ADAPTER, NOT_FINITE, SamplingParams
from penstock.backend.sequences.pictures import SequencePictures
from penstock.backend.sequences.prompt_lookup import Guesser
from penstock.backend.sequences.subscribers import Subscriber, Subscribers
from penstock.backend.sequences.tenant_account import NOBODY, Group
from penstock.backend.structured_output.constraints import SequenceConstraints
from penstock.shm.buffers.buffer_export import Loan
from penstock.shm.messages import EventLogprobs, Pooled


class KvState:
    """The pages of one sequence. All but `page_hashes` is empty while the sequence waits."""

    __slots__ = (
        "drafts_end",
        "is_suspect",
        "kept_borders",
        "next_border",
        "next_page_end",
        "num_cached",
        "num_indexed_pages",
        "num_prefilled",
        "page_hashes",
        "pages",
        "passed",
        "passing_hash",
        "saving",
        "state_place",
    )

    def __init__(self) -> None:
        self.page_hashes: list[bytes] = []
        """Hashes of the first full pages; extended on demand."""
        self.pages: list[int] = []
        """Set by set, see `KvGroups`; void where they are passed."""
        self.passed: tuple[int, ...] = (0,)
        """By group, the first pages behind the window, which the sequence does not hold any more."""
        self.num_cached = 0
        """Tokens whose KV was found in the prefix cache at admission."""
        self.num_prefilled = 0
        """Given tokens whose KV is computed by applied steps."""
        self.num_indexed_pages = 0
        """First pages that are complete and known to the pool by their hash."""
        self.next_page_end = 0
        """Number of tokens that completes the next page."""
        self.is_suspect = False
        """The pages may hold bad values. No other sequence may find or copy them."""
        # Checkpoints of its state, which `StateCheckpoints` keeps
        self.next_border = sys.maxsize
        """Number of tokens after which a step must end, to keep the state."""
        self.kept_borders: list[int] = []
        """Numbers of tokens after which others will need the state, ascending."""
        self.saving: dict[int, tuple[int, bool]] = {}
        """Number of tokens → the held checkpoint that a step in flight writes, and whether others will need it."""
        self.drafts_end = 0
        """Number of tokens after the last drafts, which a step in flight may verify: it keeps no state before."""
        self.state_place = -1
        """The held checkpoint with which its next row begins; -1 for none."""
        self.passing_hash = b""
        """Hash of its latest page with a checkpoint that it alone needs; empty if there is none."""

    @property
    def held_pages(self) -> list[int]:
        passed = self.passed
        if len(passed) == 1:
            return self.pages[passed[0] :]
        count = len(passed)
        return [page for place, page in enumerate(self.pages) if place // count >= passed[place % count]]

    def drop_pages(self) -> None:
        self.pages = []
        self.passed = (0,) * len(self.passed)

    def clear(self) -> None:
        """Forget the pages. The caller has released them."""
        self.drop_pages()
        self.num_cached = 0
        self.num_indexed_pages = 0
        self.is_suspect = False


_NO_TOKEN = frozenset([NOT_FINITE])
NEW = 1 << 63
"""`admitted_ns` of a sequence that has not been admitted before."""


class Parking:
    """The patience of one sequence: it waits as long as its prefix grows within a number of steps."""

    __slots__ = ("deadline_step", "num_available", "num_pages_passed")

    def __init__(self) -> None:
        self.num_available = -1
        """Tokens of the prefix that were computed at the last check."""
        self.deadline_step = 0
        """Step before which `num_available` must grow."""
        self.num_pages_passed = 0
        """Pages that later sequences have taken since this one was first found not to fit."""

    def may_wait(self, num_available: int, step: int, max_steps: int) -> bool:
        """Note that num_available tokens of the prefix are computed now. False if it has not grown for max_steps."""
        if num_available > self.num_available:
            self.num_available = num_available
            self.deadline_step = step + max_steps
        return step < self.deadline_step

    def restart(self) -> None:
        self.num_available = -1
        self.num_pages_passed = 0


class Sequence:
    """Tokens being computed. `num_computed` catches up with the known tokens and with those that launched steps sample.

    Steps are given the first `num_given_tokens` tokens. Each later token is the one that the slot sampled last, even if
    the main thread does not know it yet.

    Only the main thread writes, with one exception: the executor sets `stopped_generation` when a sampled token ends
    the sequence for all its subscribers, when a step of it fails, or when a mask is late. So rows that are already
    planned for it are dropped before the main thread knows. In the first two cases it sets `final_generation` too.
    """

    __slots__ = (
        "account",
        "adapter",
        "admitted_ns",
        "capacity_tokens",
        "common_stop_ids",
        "constraints",
        "embeddings",
        "ended",
        "failed_generation",
        "fast_path_until",
        "final_generation",
        "generation",
        "goes_first",
        "group",
        "guesser",
        "kv",
        "max_total_tokens",
        "needs_slot_init",
        "num_computed",
        "num_given_tokens",
        "num_prompt_logprobs",
        "num_prompt_tokens",
        "num_scored",
        "order",
        "output",
        "parking",
        "past_logprobs",
        "pictures",
        "pooled",
        "queue_s",
        "rank",
        "round",
        "salt",
        "sampling",
        "slot",
        "stop_ids",
        "stopped_generation",
        "subscriber_ids",
        "subscribers",
        "tenant",
        "tokens",
        "weight",
    )

    def __init__(
        self,
        subscriber: Subscriber,
        tokens: bytes,
        num_prompt_tokens: int,
        sampling: SamplingParams,
        *,
        salt: bytes = b"",
        tenant: bytes = b"",
        weight: float = 1.0,
        rank: float = 0.0,
        admitted_ns: int = 0,
        constraints: SequenceConstraints | None = None,
    ) -> None:
        # Tokens
        self.tokens, self.num_prompt_tokens = array("i", tokens), num_prompt_tokens
        self.sampling = sampling
        self.salt = salt
        """Keeps tenants, and sequences with other adapters, apart in the prefix cache."""
        self.adapter = NO_ADAPTER
        """As in `StepBatch.adapters`."""
        self.tenant = tenant
        """The scheduler charges this tenant for its tokens."""
        self.weight = weight
        """The tenant's share in proportion to the others', as of this request."""
        self.account = NOBODY
        """The tenant's; set by `Scheduler.add`."""
        self.constraints = constraints
        """Used by the executor's thread alone."""
        self.pooled: Pooled | None = None
        """Its result is a vector, and this says which: kind and second_start are those of all subscribers."""
        self.embeddings: Loan | None = None
        """The prompt, if it is given as embeddings. The link ends the loan with the request."""
        self.pictures: SequencePictures | None = None  # in the prompt
        # Delivery
        self.subscribers = Subscribers()
        self.past_logprobs: list[EventLogprobs] | None = None
        """Log probabilities of the generated tokens, for late joiners; None if nobody can join."""
        self.output: Loan | None = None
        """Buffer in which the only subscriber receives its logits. The link ends the loan with the request."""
        self.num_prompt_logprobs = -1
        """Top log probabilities per prompt token that the only subscriber receives; -1 for none."""
        self.num_scored = 0
        """First tokens of the prompt after which the next token's log probability was delivered."""
        # Properties common to all subscribers. The loop reads these for each token, so they are not in `subscribers`.
        self.max_total_tokens = 0
        """The highest limit of all subscribers."""
        self.common_stop_ids = subscriber.stop_token_ids
        """Tokens at which all subscribers stop. After a removal more may be common: that costs a row, never a token."""
        self.stop_ids: frozenset[int] = frozenset()
        """Tokens that force the slow delivery path: any subscriber's stop tokens and NOT_FINITE."""
        self.subscriber_ids: tuple[tuple[int, int], ...] = ()
        """(frontend, request id) of each subscriber; valid on the fast path."""
        self.fast_path_until = 0
        """A step after which fewer tokens than this are computed brings a fast-path token; see `update_fast_path`."""
        self.subscribe(subscriber)
        # Its turn
        self.rank = rank
        """Lower runs sooner and is preempted later."""
        self.admitted_ns = admitted_ns or NEW
        """When a backend, or a frontend without one, first admitted it: of equal ranks the oldest runs first."""
        self.group: Group | None = None
        """The request to which it belongs with others."""
        self.round = 0
        """Among new sequences of equal ranks the lowest runs first; set by `Scheduler.add`. See `TenantAccount`."""
        self.order = -1
        """Order of arrival, which decides within a round; set by `Scheduler.add`."""
        self.goes_first = False
        """It goes before all tenants' others, until it starts; see `WaitQueue`."""
        self.queue_s: float | None = None
        """Seconds from arrival to the first plan."""
        self.parking = Parking()
        # Progress
        self.slot: int | None = None
        self.needs_slot_init = True
        """The next row must tell the pass which sequence the slot has."""
        self.kv = KvState()
        self.capacity_tokens = 0
        """Tokens whose KV fits the pages."""
        self.num_computed = 0
        """Tokens whose KV is computed by the steps launched so far."""
        self.num_given_tokens = len(self.tokens)
        """Tokens known at admission, or at the last rewind."""
        self.guesser: Guesser | None = None  # made when it decodes
        self.generation = 0
        """Counts rewinds and the end. Results of a step for an older generation are dropped."""
        self.stopped_generation = -1
        """The generation whose later rows are dropped."""
        self.final_generation = self.failed_generation = -1
        """The generation in which a token ended it for all subscribers, or a step of it failed; and that in which one
        could not be launched. Earlier steps, which may still run, count."""
        self.ended = False
        """Removed from the scheduler: finished, cancelled, expired or failed."""

    @property
    def turn(self) -> tuple[float, int, int, int]:
        """Its order among all sequences: the lowest is admitted first and preempted last."""
        return self.rank, self.admitted_ns, self.round, self.order

    @property
    def has_run_before(self) -> bool:
        """An earlier backend has generated tokens for it."""
        if self.admitted_ns == NEW:
            return False
        return any(subscriber.next_index > self.num_prompt_tokens for subscriber in self.subscribers)

    def subscribe(self, subscriber: Subscriber) -> None:
        self.subscribers.add(subscriber)
        self.common_stop_ids &= subscriber.stop_token_ids
        self.max_total_tokens = max(self.max_total_tokens, subscriber.max_total_tokens)
        self.fast_path_until = 0

    def shorten(self, tokens: bytes, constraints: SequenceConstraints | None) -> None:
        """Begin with fewer of the tokens, and with the constraints after these. It has not been scheduled yet."""
        self.tokens = array("i", tokens)
        self.num_given_tokens = len(self.tokens)
        self.constraints = constraints

    def unsubscribe(self, subscriber: Subscriber) -> None:
        self.subscribers.remove(subscriber)
        if self.subscribers and subscriber.max_total_tokens == self.max_total_tokens:
            self.max_total_tokens = self.subscribers.max_total_tokens
        self.fast_path_until = 0

    def note_renamed(self) -> None:
        """Note that a subscriber belongs to another frontend now, and may have to start again."""
        self.subscribers.first_end = self.fast_path_until = 0

    def update_fast_path(self) -> None:
        """Allow the fast path after a token took the slow one.

        A fast-path token is only a token to all subscribers: it completes no page, all have started, none stops at it
        or reaches its limit, and none receives log probabilities. A change of the subscribers ends the fast path.
        """
        if not self.subscribers.first_end and self.subscribers.find_first_end():
            self.stop_ids = _NO_TOKEN.union(*(subscriber.stop_token_ids for subscriber in self.subscribers))
            self.subscriber_ids = tuple((subscriber.frontend, subscriber.request_id) for subscriber in self.subscribers)
        has_logprobs = self.sampling.num_logprobs >= 0
        self.fast_path_until = 0 if has_logprobs else min(self.kv.next_page_end, self.subscribers.first_end)

    @property
    def num_ready_tokens(self) -> int:
        """First given tokens that steps can compute now: up to a picture without embeddings, or a checkpoint."""
        end = min(self.num_given_tokens, self.kv.next_border)
        return end if self.pictures is None else self.pictures.ready_end(self.num_computed, end)

    def may_begin(self, first: int, most: int) -> bool:
        """Whether a step with at most `most` tokens can begin with this one."""
        return self.pictures is None or self.pictures.uncut(first + 1)[1] - first <= most

    def whole_chunk(self, num_tokens: int, most: int) -> int:
        """About num_tokens, at most `most`, after which a step may end that begins with the next token to compute."""
        if self.pictures is None:
            return num_tokens
        first, end = self.pictures.uncut(self.num_computed + num_tokens)
        return end - self.num_computed if end - self.num_computed <= most else max(0, first - self.num_computed)

    @property
    def awaits_mask(self) -> bool:
        """The next token cannot be sampled yet. The executor wakes the loop when it can."""
        return self.constraints is not None and self.constraints.awaits_mask

    @property
    def num_to_score(self) -> int:
        """First tokens of the prompt after which the next token's log probability is requested."""
        return self.num_prompt_tokens - 1 if self.num_prompt_logprobs >= 0 else 0

    def next_scored(self, num_tokens: int) -> tuple[int, int] | None:
        """(first, end) of the tokens to score among the next num_tokens to compute; None if there are none."""
        first = max(self.num_computed, self.num_scored)
        end = min(self.num_computed + num_tokens, self.num_to_score)
        return (first, end) if first < end else None

    @property
    def num_reusable(self) -> int:
        """First tokens whose KV may come from the cache.

        Logits are needed of the last known token, and of tokens that are still to be scored.
        """
        return self.num_scored if self.num_scored < self.num_to_score else len(self.tokens) - 1

    @property
    def num_applied(self) -> int:
        """Tokens whose KV is computed by applied steps: it stays in its pages."""
        return len(self.tokens) - 1 if len(self.tokens) > self.num_given_tokens else self.kv.num_prefilled

    def restart(self) -> None:
        """Start over after preemption. Results of steps in flight are dropped; the caller has released the pages."""
        self.slot = None
        self.capacity_tokens = 0
        self.kv.clear()
        self.parking.restart()
        self.rewind(0)

    def rewind(self, num_computed: int) -> None:
        """Drop the results of steps in flight. The pages hold the KV of the first num_computed tokens."""
        self.num_computed = self.kv.num_prefilled = num_computed
        self.num_given_tokens = len(self.tokens)
        self.fast_path_until = 0
        self.needs_slot_init = True
        self.generation += 1
