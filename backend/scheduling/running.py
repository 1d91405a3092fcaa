"""The sequences that run: their slots and pages, from admission to preemption or their end."""

from __future__ import annotations

from collections import Counter

from penstock.backend.kv_cache.kv_groups import KvGroups
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.kv_cache.prefix_cache import Awaited, Prefix, PrefixCache
from penstock.backend.kv_cache.state_checkpoints import StateCheckpoints
from penstock.backend.scheduling.step_plan import Plan
from penstock.backend.sequences.sequence import KvState, Sequence

# How a page is copied. A sequence whose prompt agrees with a cached page only up to its middle gets a page of its own,
# and the step copies the other page there before its rows run. Four things make that safe:
#
#   Only tokens of applied steps are copied, so the source's values were written by an earlier step.
#   The source may still be filled by its own sequence: that one writes behind the copied tokens, never over them.
#   A source could get a new owner in the same plan: evicted if it is idle, or given up by a sequence that is preempted
#   for a later newcomer. The step would write it while it copies it, and a GPU makes all copies at once. So the source
#   is pinned until the plan is made. Later plans may take it: steps run in their order.
#   If the row is dropped before its step is launched, its copy is dropped too (`Plan.keep`), and the page is released.
#
# Pinning an idle source needs one more available page than the sequence itself (`may_copy`); without one, the tokens
# are computed.


class RunningSequences:
    """Gives sequences slots and pages and takes them back. It does not decide which: `Admission` and `Preemption` do.

    Pages and slots may be reused at once, although steps that write to them are still in flight: steps run in the order
    in which they are planned, so a new owner writes later. A page is indexed, and so shared, only when the step that
    completed it has been applied.
    """

    def __init__(
        self,
        pool: PagePool,
        groups: KvGroups,
        max_running: int,
        num_plans_ahead: int,
        states: StateCheckpoints | None,
    ) -> None:
        """num_plans_ahead is the largest number of plans between a step's own plan and the end of that step.

        states: None unless the pass keeps state for each slot, so that a sequence cannot continue from its pages alone.
        """
        self.pool = pool
        self.groups = groups
        self._page_size = groups.page_size_tokens
        self._free_slots = list(range(max_running - 1, -1, -1))
        self.max_running = max_running
        self._num_plans_ahead = num_plans_ahead
        self.sequences: dict[Sequence, None] = {}
        """In order of admission. Others only read it."""
        self.states = states
        self.prefix_cache = PrefixCache(pool, groups, states)
        self._grown: list[Sequence] = []
        """Sequences that got more pages for this step."""
        self._page_copies: dict[Sequence, tuple[int, int]] = {}
        """Sequence → (source, destination) page of this step."""
        self._copy_sources: list[int] = []
        """Source pages of this step's copies. They are pinned until the plan is made, so that none is a destination."""
        self._page_restores: dict[Sequence, tuple[tuple[int, int], ...]] = {}
        """Sequence → (host place, page) pairs of this step."""

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_pages(self) -> int:
        return self.pool.num_pages

    def note_computed(self, sequence: Sequence, num_tokens: int) -> list[Awaited]:
        """Note that the step that computed the sequence's first num_tokens has been applied.

        Pages that they fill can be shared; returns what no sequence needs to wait for any more. Pages behind the window
        are released.
        """
        sequence.num_computed = max(sequence.num_computed, num_tokens)  # accepted drafts were not counted yet
        computed = self.prefix_cache.note_computed(sequence, num_tokens)
        if self.groups.has_windows:
            self._pass_pages(sequence.kv, self.groups.num_passed(num_tokens))
        return computed

    def _pass_pages(self, kv: KvState, passed: tuple[int, ...]) -> None:
        """Release the first pages of each group that are not released yet."""
        count = len(passed)
        for group, (first, end) in enumerate(zip(kv.passed, passed, strict=True)):
            self.pool.release(kv.pages[first * count + group : end * count : count])
        kv.passed = tuple(map(max, kv.passed, passed))

    def start(self, sequence: Sequence, prefix: Prefix, num_new_pages: int, *, may_copy: bool) -> None:
        """Start the sequence. may_copy: the source page has other holders, or one page is left over."""
        kv = sequence.kv
        self.sequences[sequence] = None
        sequence.account.num_running += 1
        sequence.slot = self._free_slots.pop()
        for page in prefix.pages:
            self.pool.hold(page)
        num_indexed = prefix.num_held_or_passed
        # Restored first: a save must not overwrite content that comes back.
        places = list(map(self.pool.host_offload.restore, kv.page_hashes[num_indexed : prefix.num_full_pages]))
        self.pool.mark_for_offload(kv.page_hashes[:num_indexed])
        kv.num_prefilled = num_indexed * self._page_size
        num_cached = prefix.num_full_pages * self._page_size
        if prefix.num_copied_tokens and may_copy:
            num_cached += prefix.num_copied_tokens
            self.pool.pin(prefix.copy_source)
            self._copy_sources.append(prefix.copy_source)
        kv.passed = prefix.passed
        self._give(sequence, prefix.listed_pages + self.pool.allocate(num_new_pages))
        restores = list(zip(places, kv.pages[num_indexed:], strict=False))
        if self.states is not None:
            restored = self.states.start(sequence, prefix.num_full_pages, prefix.num_shared_pages)
            restores += [(place, self.num_pages + checkpoint) for place, checkpoint in restored]
        if restores:
            self._page_restores[sequence] = tuple(restores)
        if num_cached > prefix.num_full_pages * self._page_size:
            self._page_copies[sequence] = prefix.copy_source, kv.pages[prefix.num_full_pages]
        sequence.num_computed = kv.num_cached = num_cached
        kv.num_indexed_pages = num_indexed
        kv.next_page_end = kv.num_prefilled + self._page_size
        self.prefix_cache.start(sequence)

    def rewind(self, sequence: Sequence, num_computed: int) -> None:
        """Drop the results of a running sequence's steps in flight. It continues after its first num_computed tokens.

        A state cannot go back: then it continues from a checkpoint before, or begins again. It gives up the pages
        behind, because others may read them while it computes their content again.
        """
        if self.states is not None:
            kv, count = sequence.kv, self.groups.count
            num_pages = self.states.go_back(sequence, num_computed)
            self.pool.release(kv.pages[num_pages * count :])
            del kv.pages[num_pages * count :]
            num_computed = sequence.capacity_tokens = num_pages * self._page_size
            self.prefix_cache.go_back(sequence, num_pages)
        sequence.rewind(num_computed)

    def grow(self, sequence: Sequence, num_pages: int) -> None:
        """Give the sequence num_pages more, which the pool has."""
        self._give(sequence, self.pool.allocate(num_pages))
        self._grown.append(sequence)

    def missing_pages(self, sequence: Sequence, num_tokens: int) -> int:
        """Pages that the sequence lacks for num_tokens; negative if it has more."""
        return self.groups.pages_for(num_tokens) - len(sequence.kv.pages)

    def _give(self, sequence: Sequence, pages: list[int]) -> None:
        sequence.kv.pages += pages
        sequence.capacity_tokens = len(sequence.kv.pages) // self.groups.count * self._page_size

    def stop(self, sequence: Sequence, *, is_preempted: bool = False) -> list[Awaited]:
        """Take back slot and pages. Returns what no sequence needs to wait for any more.

        is_preempted: it will want its pages again, so they are worth a copy on the host.
        """
        if is_preempted:
            self.pool.mark_for_offload(sequence.kv.page_hashes[: sequence.kv.num_indexed_pages])
        del self.sequences[sequence]
        sequence.account.num_running -= 1
        awaited = self.prefix_cache.stop(sequence)
        if self.states is not None:
            self.states.stop(sequence)
        self.pool.release(sequence.kv.held_pages)
        sequence.kv.drop_pages()
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)
            sequence.slot = None
        return awaited

    def leave_pages(self) -> None:
        """Leave full pages, and states, to the next backend."""
        if self.states is not None:
            self.states.leave(self.sequences)
        self.pool.leave([name for each in self.sequences for name in each.kv.page_hashes[: each.kv.num_indexed_pages]])

    def take_saves(self) -> tuple[tuple[int, int], ...]:
        """(page, host place) pairs to copy before the next step. A checkpoint has a number behind those of pages."""
        saves = self.pool.host_offload.take_saves()
        if self.states is None:
            return saves
        of_states = self.states.pool.host_offload.take_saves()
        return saves + tuple((self.num_pages + checkpoint, place) for checkpoint, place in of_states)

    def note_step_ended(self) -> None:
        """Note that the oldest step launched after `take_saves` has ended."""
        self.pool.host_offload.note_step_ended()
        if self.states is not None:
            self.states.pool.host_offload.note_step_ended()

    def describe_pages(self, plan: Plan) -> None:
        """Fill the plan's columns about pages and states. From then on source pages of its copies may be reused."""
        plan.grown = [sequence for sequence in self._grown if sequence.slot is not None]
        self._grown.clear()
        plan.page_copies, self._page_copies = self._page_copies, {}
        plan.page_restores, self._page_restores = self._page_restores, {}
        self.pool.host_offload.end_plan()
        if self.states is not None:
            plan.state_restores = self.states.take_restores(plan.slot_init_sequences)
            plan.state_saves = self.states.move(plan.sequences, plan.ends)
            self.states.pool.host_offload.end_plan()
        self.pool.release(self._copy_sources)
        self._copy_sources.clear()

    # Pages that will be needed

    def is_enough(self, num_left: int, newcomer: Sequence) -> bool:
        """Whether num_left pages suffice for the plans that are made before the newcomer's first step is applied."""
        num_ahead = self._num_plans_ahead
        if num_left >= num_ahead * (len(self.sequences) + 1) * self.groups.count:
            return True
        num_tokens, most = len(newcomer.tokens), newcomer.max_total_tokens
        num_due = self.groups.most_pages(min(num_tokens + max(1, num_ahead), most))
        num_due -= self.groups.most_pages(min(num_tokens + 1, most))
        for sequence in self.sequences:
            num_tokens = max(sequence.num_computed, sequence.num_given_tokens) + num_ahead
            last_computed = sequence.max_total_tokens - 1
            if num_tokens > sequence.capacity_tokens < last_computed:
                num_pages = self.groups.first_pages(min(num_tokens, last_computed), sequence.kv.passed)
                num_due += max(0, num_pages - len(sequence.kv.pages))
        return num_left >= num_due

    def num_promised(self) -> int:
        """Pages that the running sequences' prompts will still take, of the pages that admission has reserved."""
        if self.groups.count == 1:
            return 0
        return sum(self._pages_later(sequence) for sequence in self.sequences)

    def _pages_later(self, sequence: Sequence) -> int:
        if sequence.num_computed >= sequence.num_given_tokens:
            return 0
        return self.groups.later_pages(sequence.num_given_tokens, sequence.kv.passed, len(sequence.kv.pages))

    def check_integrity(self, waiting: list[Sequence], awaited: set[Awaited]) -> None:
        """Raises RuntimeError unless pages and slots are conserved, and what parked sequences wait for is computed."""
        self.pool.check_integrity()
        holders = Counter(page for sequence in self.sequences for page in sequence.kv.held_pages)
        if len(holders) != self.pool.num_held:
            raise RuntimeError(f"{self.pool.num_held} pages are held, running sequences have {len(holders)}")
        if any(self.pool.num_holders(page) != count for page, count in holders.items()):
            raise RuntimeError("a page's holder count differs from the number of sequences that have it")
        slots = {sequence.slot for sequence in self.sequences}
        if None in slots or len(slots) != len(self.sequences) or len(slots) + len(self._free_slots) != self.max_running:
            raise RuntimeError(f"{len(slots)} slots are taken and {len(self._free_slots)} free of {self.max_running}")
        for sequence in self.sequences:
            if sequence.ended or self.missing_pages(sequence, sequence.num_computed) > 0:
                raise RuntimeError("a running sequence has ended or computed more than its pages hold")
        for sequence in waiting:
            if sequence.kv.pages or sequence.slot is not None or sequence.ended or sequence in self.sequences:
                raise RuntimeError("a waiting sequence holds pages or a slot, or has ended, or runs")
        self.prefix_cache.check_integrity(self.sequences, awaited)
        if self.states is not None:
            self.states.check_integrity(self.sequences)
        counts = Counter(sequence.account for sequence in self.sequences)
        if any(sequence.account.num_running != counts[sequence.account] for sequence in waiting):
            raise RuntimeError("the running sequences of a tenant are not counted")
