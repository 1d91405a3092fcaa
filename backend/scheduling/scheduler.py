"""Decides which sequences run in the next step, and how many tokens of each. Knows pages and slots, no model, no link.

There is no prefill phase and no decode phase. A step takes the running sequences first: decodes, then those with more
tokens to compute. Then it admits as many waiting sequences as slots, pages and the token budget allow.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, TypeAlias

from penstock.backend.kv_cache.prefix_cache import PrefixCache
from penstock.backend.scheduling.step_plan import Plan
from penstock.backend.scheduling.wait_queue import WaitQueue

if TYPE_CHECKING:
    from penstock.backend.kv_cache.host_offload import HostOffload
    from penstock.backend.kv_cache.page_pool import PagePool
    from penstock.backend.kv_cache.prefix_cache import Prefix
    from penstock.backend.sequences.sequence import Sequence

    Chunk: TypeAlias = tuple[Sequence, int]
    """A sequence with known tokens that are not computed, and how many of them the step computes."""


class Scheduler:
    """All sequences that have not ended: each is either waiting or running.

    Pages and slots may be reused at once, although steps that write to them are still in flight: steps run in the order
    in which they are planned, so a new owner writes later. A page is indexed, and so shared, only when the step that
    completed it has been applied.
    """

    def __init__(
        self,
        pool: PagePool,
        page_size_tokens: int,
        max_running: int,
        max_batch_tokens: int,
        max_park_steps: int = 64,
        num_plans_ahead: int = 1,
    ) -> None:
        """A sequence that waits for another one's prefix does so while the prefix grows within max_park_steps steps.

        num_plans_ahead is the largest number of plans between a step's own plan and the end of that step.
        """
        self._pool = pool
        self._page_size = page_size_tokens
        self._max_batch_tokens = max_batch_tokens
        self._free_slots = list(range(max_running - 1, -1, -1))
        self.max_running = max_running
        self._waiting = WaitQueue()
        self._running: dict[Sequence, None] = {}  # in order of admission
        self._prefix_cache = PrefixCache(pool, page_size_tokens)
        self._grown: list[Sequence] = []
        """Sequences that got more pages for this step."""
        self._page_copies: dict[Sequence, tuple[int, int]] = {}
        """Sequence → (source, destination) page of this step."""
        self._copy_sources: list[int] = []
        """Idle source pages of this step's copies. They are held until the plan is made, so that none is reused."""
        self._page_restores: dict[Sequence, tuple[tuple[int, int], ...]] = {}
        """Sequence → (host place, page) pairs of this step."""
        self._max_park_steps = max_park_steps
        self._num_plans_ahead = num_plans_ahead
        self._bisections: deque[list[Chunk]] = deque()
        """Parts of failed steps. Each runs before anything else, as a step of its own."""
        self._num_plans = 0
        """Plans with rows."""
        self._num_added = 0
        self.num_preemptions = 0
        self._preempted: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_pages_held(self) -> int:
        return self._pool.num_held

    @property
    def num_pages_idle(self) -> int:
        return self._pool.num_idle

    @property
    def host_offload(self) -> HostOffload:
        """Read by metrics only."""
        return self._pool.host_offload

    def add(self, sequence: Sequence) -> None:
        """Put the sequence into the wait queue. The caller has checked that the pool can hold it."""
        sequence.order = self._num_added
        self._num_added += 1
        self._waiting.put(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence has ended, in whatever state. Its pages and slot are free at once."""
        sequence.ended = True
        sequence.generation += 1
        if sequence.order < 0:  # it was never added
            return
        if sequence in self._running:
            self._stop_running(sequence)
        else:
            self._waiting.forget(sequence)
        if sequence.embeddings is not None:  # no other sequence can find their KV
            self._pool.discard(sequence.kv.page_hashes)

    def plan(self) -> Plan:
        """Plan the next step; a plan without rows if there is nothing to do."""
        while self._bisections:
            if chunks := [(sequence, length) for sequence, length in self._bisections.popleft() if not sequence.ended]:
                return self._make_plan([], chunks)
        self._waiting.unpark_overdue(self._num_plans)
        num_preemptions = self.num_preemptions
        decodes, unfinished = self._choose_decodes(self._max_batch_tokens)
        budget = self._max_batch_tokens - len(decodes)
        chunks = []
        for sequence in unfinished:
            num_tokens = min(sequence.num_given_tokens - sequence.num_computed, budget)
            if num_tokens > 0 and self._find_pages(sequence, sequence.num_computed + num_tokens):
                chunks.append((sequence, num_tokens))
                budget -= num_tokens
        if self.num_preemptions == num_preemptions:
            self._admit(chunks, budget)
        else:
            decodes = [sequence for sequence in decodes if sequence.slot is not None]
            chunks = [chunk for chunk in chunks if chunk[0].slot is not None]
        plan = self._make_plan(decodes, chunks)
        self._num_plans += bool(plan)
        return plan

    def _choose_decodes(self, budget: int) -> tuple[list[Sequence], list[Sequence]]:
        """Advance the sequences that decode. Returns them, and the running ones with given tokens left to compute."""
        decodes: list[Sequence] = []
        need_pages, unfinished = [], []
        for sequence in self._running:
            end = sequence.num_computed + 1
            if end <= sequence.num_given_tokens:
                unfinished.append(sequence)
            elif end >= sequence.max_total_tokens:
                continue  # the very last token is never computed: nothing follows it
            elif end > sequence.capacity_tokens:
                need_pages.append(sequence)
            else:
                sequence.num_computed = end
                decodes.append(sequence)
        for sequence in decodes[budget:]:
            sequence.num_computed -= 1
        del decodes[budget:]
        for sequence in need_pages:
            if len(decodes) < budget and self._find_pages(sequence, sequence.num_computed + 1):
                sequence.num_computed += 1
                decodes.append(sequence)
        return decodes, unfinished

    def bisect(self, chunks: list[Chunk]) -> None:
        """A step with these rows has failed. Rewind them to before it, and run each half as a step of its own first."""
        for sequence, _ in chunks:
            sequence.rewind(sequence.num_applied)
            sequence.kv.num_cached = min(sequence.kv.num_cached, sequence.num_computed)
        middle = (len(chunks) + 1) // 2
        self._bisections.extendleft(half for half in (chunks[middle:], chunks[:middle]) if half)

    def _make_plan(self, decodes: list[Sequence], chunks: list[Chunk]) -> Plan:
        """A plan from decodes, which are advanced already, and chunks, which are advanced here."""
        plan = Plan(decodes, lengths=[1] * len(decodes), num_decodes=len(decodes))
        plan.logit_rows = list(range(len(decodes)))
        for sequence, num_tokens in sorted(chunks, key=lambda chunk: chunk[1] > 1):
            sequence.num_computed += num_tokens
            if sequence.num_computed == len(sequence.tokens):
                plan.logit_rows.append(len(plan))
            if sequence.needs_slot_init:
                sequence.needs_slot_init = False
                plan.slot_init_sequences.append(sequence)
            plan.sequences.append(sequence)
            plan.lengths.append(num_tokens)
        plan.generations = [sequence.generation for sequence in plan.sequences]
        plan.slots = [sequence.slot for sequence in plan.sequences]
        plan.ends = [sequence.num_computed for sequence in plan.sequences]
        plan.grown = [sequence for sequence in self._grown if sequence.slot is not None]
        self._grown.clear()
        plan.page_copies, self._page_copies = self._page_copies, {}
        plan.page_restores, self._page_restores = self._page_restores, {}
        self._pool.host_offload.end_plan()
        self._pool.release(self._copy_sources)
        self._copy_sources.clear()
        return plan

    def note_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """The step that computed the sequence's first num_tokens has been applied. Pages that they fill can be shared,
        and sequences that wait for these pages are unparked."""
        self._waiting.unpark(self._prefix_cache.note_computed(sequence, num_tokens))

    def invalidate_tenant(self, sequence: Sequence) -> None:
        """Make all cached pages of the sequence's tenant unfindable: its logits were bad, so its pages may be, and with
        them the pages that it found or that others copied from it."""
        self._prefix_cache.invalidate_tenant(sequence.salt)

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        """Start waiting sequences in order while budget, slots and pages last.

        A slot is kept free for each parked sequence, because it came first. This also bounds the number of sequences of
        one prefix that are looked at in one plan.
        """
        while (
            len(self._free_slots) > self._waiting.num_parked
            and budget > 0
            and (sequence := self._waiting.head()) is not None
        ):
            prefix = self._prefix_cache.find(sequence)
            num_available = prefix.num_full_pages * self._page_size + prefix.num_copied_tokens
            if prefix.awaited is not None and sequence.parking.may_wait(
                num_available, self._num_plans, self._max_park_steps
            ):
                self._waiting.park_head(prefix.awaited, self._num_plans + self._max_park_steps)
                continue
            # All its known tokens and the next one must fit now, and so must the pages that others take before its
            # first step is applied. Otherwise it could be preempted before it makes progress.
            num_tokens = min(len(sequence.tokens) + 1, sequence.max_total_tokens)
            num_new = self._pages_for(num_tokens) - len(prefix.pages)
            num_left = self._pool.num_available - num_new - sum(map(self._pool.is_idle, prefix.pages))
            if num_left < 0 or not self._is_enough(num_left, sequence):
                return
            self._waiting.take_head()
            self._start(sequence, prefix, num_new, may_copy=num_left > 0 or not self._pool.is_idle(prefix.copy_source))
            num_tokens = min(sequence.num_given_tokens - sequence.num_computed, budget)
            chunks.append((sequence, num_tokens))
            budget -= num_tokens

    def _is_enough(self, num_left: int, newcomer: Sequence) -> bool:
        """Whether num_left pages last for the plans that are made before the newcomer's first step is applied."""
        num_ahead = self._num_plans_ahead
        if num_left >= num_ahead * (len(self._running) + 1):
            return True
        num_tokens, most = len(newcomer.tokens), newcomer.max_total_tokens
        num_due = self._pages_for(min(num_tokens + max(1, num_ahead), most))
        num_due -= self._pages_for(min(num_tokens + 1, most))
        for sequence in self._running:
            num_tokens = max(sequence.num_computed, sequence.num_given_tokens) + num_ahead
            last_computed = sequence.max_total_tokens - 1
            if num_tokens > sequence.capacity_tokens < last_computed:
                num_due += self._pages_for(min(num_tokens, last_computed)) - len(sequence.kv.pages)
        return num_left >= num_due

    def _start(self, sequence: Sequence, prefix: Prefix, num_new_pages: int, *, may_copy: bool) -> None:
        """may_copy: the source page is held by others, or one page is left over."""
        kv = sequence.kv
        self._running[sequence] = None
        sequence.slot = self._free_slots.pop()
        for page in prefix.pages:
            self._pool.hold(page)
        self._pool.mark_for_offload(kv.page_hashes[: len(prefix.pages)])
        places = list(map(self._pool.host_offload.restore, kv.page_hashes[len(prefix.pages) : prefix.num_full_pages]))
        kv.num_prefilled = len(prefix.pages) * self._page_size
        num_cached = prefix.num_full_pages * self._page_size
        if prefix.num_copied_tokens and may_copy:
            num_cached += prefix.num_copied_tokens
            if self._pool.is_idle(prefix.copy_source):
                self._pool.hold(prefix.copy_source)
                self._copy_sources.append(prefix.copy_source)
        self._give_pages(sequence, prefix.pages + self._pool.allocate(num_new_pages))
        if places:
            self._page_restores[sequence] = tuple(zip(places, kv.pages[len(prefix.pages) :], strict=False))
        if num_cached > prefix.num_full_pages * self._page_size:
            self._page_copies[sequence] = prefix.copy_source, kv.pages[prefix.num_full_pages]
        sequence.num_computed = kv.num_cached = num_cached
        kv.num_indexed_pages = len(prefix.pages)
        kv.next_page_end = kv.num_prefilled + self._page_size
        self._prefix_cache.start(sequence)

    def _find_pages(self, sequence: Sequence, num_tokens: int) -> bool:
        """Get pages for num_tokens of a running sequence, and preempt lower ranks for them. False if it is preempted
        itself."""
        if sequence.slot is None:
            return False
        missing = self._pages_for(num_tokens) - len(sequence.kv.pages)
        while missing > self._pool.num_available:
            last = max(self._running, key=lambda running: (running.rank, running.order))
            self._preempt(last)
            if last is sequence:
                return False
        if missing > 0:
            self._give_pages(sequence, self._pool.allocate(missing))
            self._grown.append(sequence)
        return True

    def _give_pages(self, sequence: Sequence, pages: list[int]) -> None:
        sequence.kv.pages += pages
        sequence.capacity_tokens = len(sequence.kv.pages) * self._page_size

    def _preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back into the wait queue. Its pages stay cached until others need them."""
        self._pool.mark_for_offload(sequence.kv.page_hashes[: sequence.kv.num_indexed_pages])
        self._stop_running(sequence)
        sequence.restart()
        self._waiting.put(sequence)
        self._preempted.append(sequence)
        self.num_preemptions += 1

    def take_saves(self) -> tuple[tuple[int, int], ...]:
        """(page, host place) pairs to copy before the next step. Call it when that step is launched."""
        return self._pool.host_offload.take_saves()

    def take_preempted(self) -> list[Sequence]:
        """Sequences preempted since the last call, once per preemption."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def _stop_running(self, sequence: Sequence) -> None:
        del self._running[sequence]
        self._waiting.unpark(self._prefix_cache.stop(sequence))
        self._pool.release(sequence.kv.pages)
        sequence.kv.pages = []
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)
            sequence.slot = None

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless pages and slots are conserved and each parked sequence waits for a running one."""
        self._pool.check_integrity()
        holders = Counter(page for sequence in self._running for page in sequence.kv.pages)
        if len(holders) != self._pool.num_held:
            raise RuntimeError(f"{self._pool.num_held} pages are held, running sequences have {len(holders)}")
        if any(self._pool.num_holders(page) != count for page, count in holders.items()):
            raise RuntimeError("a page's holder count differs from the number of sequences that have it")
        slots = {sequence.slot for sequence in self._running}
        if None in slots or len(slots) != len(self._running) or len(slots) + len(self._free_slots) != self.max_running:
            raise RuntimeError(f"{len(slots)} slots are taken and {len(self._free_slots)} free of {self.max_running}")
        for sequence in self._running:
            if sequence.ended or self._pages_for(sequence.num_computed) > len(sequence.kv.pages):
                raise RuntimeError("a running sequence has ended or computed more than its pages hold")
        for sequence in self._waiting.sequences():
            if sequence.kv.pages or sequence.slot is not None or sequence.ended or sequence in self._running:
                raise RuntimeError("a waiting sequence holds pages or a slot, or has ended, or runs")
        if any(sequence.parking.deadline_step < self._num_plans for sequence in self._waiting.parked()):
            raise RuntimeError("a parked sequence is past its deadline")
        self._prefix_cache.check_integrity(self._running, self._waiting.parked_keys())
