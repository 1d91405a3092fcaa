"""The sequences that run: their slots and pages, from admission to preemption or their end."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from penstock.backend.kv_cache.no_prefix_cache import NoPrefixCache
from penstock.backend.kv_cache.prefix_cache import PrefixCache
from penstock.backend.scheduling.tenants import Tenants
from penstock.backend.scheduling.wait_queue import WaitQueue

if TYPE_CHECKING:
    from penstock.backend.kv_cache.host_offload import HostOffload
    from penstock.backend.kv_cache.kv_groups import KvGroups
    from penstock.backend.kv_cache.page_pool import PagePool
    from penstock.backend.kv_cache.prefix_cache import Prefix
    from penstock.backend.sequences.kv_state import KvState
    from penstock.backend.sequences.sequence import Sequence
    from penstock.backend.sequences.tenant import TenantAccount


class RunningSequences:
    """Gives sequences slots and pages and takes them back. A sequence that loses them waits again.

    Pages and slots may be reused at once, although steps that write to them are still in flight: steps run in the order
    in which they are planned, so a new owner writes later. A page is indexed, and so shared, only when the step that
    completed it has been applied.
    """

    def __init__(
        self, pool: PagePool, groups: KvGroups, max_running: int, num_plans_ahead: int, *, keeps_state: bool
    ) -> None:
        """num_plans_ahead is the largest number of plans between a step's own plan and the end of that step.

        keeps_state: the pass keeps state for each slot, so a sequence cannot continue from its pages alone.
        """
        self._pool = pool
        self._groups = groups
        self._page_size = groups.page_size_tokens
        self._free_slots = list(range(max_running - 1, -1, -1))
        self.max_running = max_running
        self._num_plans_ahead = num_plans_ahead
        self._tenants = Tenants()
        self._waiting = WaitQueue(self._tenants)
        self._running: dict[Sequence, None] = {}  # in order of admission
        self._keeps_state = keeps_state
        self._prefix_cache = NoPrefixCache(groups.count) if keeps_state else PrefixCache(pool, groups)
        self._grown: list[Sequence] = []
        """Sequences that got more pages for this step."""
        self._page_copies: dict[Sequence, tuple[int, int]] = {}
        """Sequence → (source, destination) page of this step."""
        self._copy_sources: list[int] = []
        """Idle source pages of this step's copies. They are held until the plan is made, so that none is reused."""
        self._page_restores: dict[Sequence, tuple[tuple[int, int], ...]] = {}
        """Sequence → (host place, page) pairs of this step."""
        self.num_preemptions = 0
        self._preempted: list[Sequence] = []

    @property
    def has_work(self) -> bool:
        """Whether `plan` may return rows; see `ISequenceScheduler`."""
        return bool(self._running or self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def num_waiting_of(self, tenant: bytes) -> int:
        return self._tenants.num_waiting_of(tenant)

    def share_of(self, tenant: bytes, weight: float) -> float:
        """The part of all places that the tenant may claim, or could claim with a sequence of this weight."""
        return self._tenants.share_with(tenant, weight)

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
        """The pool's host pages, for metrics and to note that a step has ended."""
        return self._pool.host_offload

    def note_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that the step that computed the sequence's first num_tokens has been applied.

        Pages that they fill can be shared, and sequences that wait for these pages are unparked. Pages behind the
        window are released.
        """
        self._waiting.unpark(self._prefix_cache.note_computed(sequence, num_tokens))
        if self._groups.has_windows:
            self._pass_pages(sequence.kv, self._groups.num_passed(num_tokens))

    def _pass_pages(self, kv: KvState, passed: tuple[int, ...]) -> None:
        """Release the first pages of each group that are not released yet."""
        count = len(passed)
        for group, (first, end) in enumerate(zip(kv.passed, passed, strict=True)):
            self._pool.release(kv.pages[first * count + group : end * count : count])
        kv.passed = tuple(map(max, kv.passed, passed))

    def rewind(self, sequence: Sequence, num_computed: int) -> None:
        """Drop the results of a running sequence's steps in flight.

        It continues after its first num_computed tokens. If the pass keeps state, it begins again: the state may have
        advanced further, and cannot go back.
        """
        sequence.rewind(0 if self._keeps_state else num_computed)

    def invalidate_tenant(self, sequence: Sequence) -> None:
        """Make all cached pages of the sequence's tenant unfindable.

        Its logits were bad, so its pages may be bad, and with them the pages that it found or that others copied from
        it.
        """
        self._prefix_cache.invalidate_tenant(sequence.salt)

    def take_saves(self) -> tuple[tuple[int, int], ...]:
        """(page, host place) pairs to copy before the next step. Call it when that step is launched."""
        return self._pool.host_offload.take_saves()

    def take_preempted(self) -> list[Sequence]:
        """Sequences preempted since the last call, once per preemption."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def _is_enough(self, num_left: int, newcomer: Sequence) -> bool:
        """Whether num_left pages suffice for the plans that are made before the newcomer's first step is applied."""
        num_ahead = self._num_plans_ahead
        if num_left >= num_ahead * (len(self._running) + 1) * self._groups.count:
            return True
        num_tokens, most = len(newcomer.tokens), newcomer.max_total_tokens
        num_due = self._groups.most_pages(min(num_tokens + max(1, num_ahead), most))
        num_due -= self._groups.most_pages(min(num_tokens + 1, most))
        for sequence in self._running:
            num_tokens = max(sequence.num_computed, sequence.num_given_tokens) + num_ahead
            last_computed = sequence.max_total_tokens - 1
            if num_tokens > sequence.capacity_tokens < last_computed:
                num_pages = self._groups.first_pages(min(num_tokens, last_computed), sequence.kv.passed)
                num_due += max(0, num_pages - len(sequence.kv.pages))
        return num_left >= num_due

    def _start(self, sequence: Sequence, prefix: Prefix, num_new_pages: int, *, may_copy: bool) -> None:
        """Start the sequence. may_copy: the source page has other holders, or one page is left over."""
        kv = sequence.kv
        self._running[sequence] = None
        sequence.account.num_running += 1
        sequence.goes_first = False
        sequence.account.leave_round(sequence.group, sequence.round, has_started=True)
        sequence.slot = self._free_slots.pop()
        for page in prefix.pages:
            self._pool.hold(page)
        num_indexed = prefix.num_held_or_passed
        # Restored first: a save must not overwrite content that comes back.
        places = list(map(self._pool.host_offload.restore, kv.page_hashes[num_indexed : prefix.num_full_pages]))
        self._pool.mark_for_offload(kv.page_hashes[:num_indexed])
        kv.num_prefilled = num_indexed * self._page_size
        num_cached = prefix.num_full_pages * self._page_size
        if prefix.num_copied_tokens and may_copy:
            num_cached += prefix.num_copied_tokens
            if self._pool.is_idle(prefix.copy_source):
                self._pool.hold(prefix.copy_source)
                self._copy_sources.append(prefix.copy_source)
        kv.passed = prefix.passed
        self._give_pages(sequence, prefix.listed_pages + self._pool.allocate(num_new_pages))
        if places:
            self._page_restores[sequence] = tuple(zip(places, kv.pages[num_indexed:], strict=False))
        if num_cached > prefix.num_full_pages * self._page_size:
            self._page_copies[sequence] = prefix.copy_source, kv.pages[prefix.num_full_pages]
        sequence.num_computed = kv.num_cached = num_cached
        kv.num_indexed_pages = num_indexed
        kv.next_page_end = kv.num_prefilled + self._page_size
        self._prefix_cache.start(sequence)

    def _find_pages(self, sequence: Sequence, num_tokens: int) -> bool:
        """Get pages for num_tokens of a running sequence, preempting others if necessary. False if it is preempted
        itself."""
        if sequence.slot is None:
            return False
        missing = self._groups.pages_for(num_tokens) - len(sequence.kv.pages)
        while missing > self._pool.num_available:
            last = self._choose_victim()
            self._preempt(last)
            if last is sequence:
                return False
        if missing > 0:
            self._give_pages(sequence, self._pool.allocate(missing))
            self._grown.append(sequence)
        return True

    def _choose_victim(self) -> Sequence:
        """The last sequence of the tenant that holds the most pages for its weight.

        The first of all sequences keeps its pages as long as another runs, so one sequence always finishes.
        """
        if not self._tenants.are_several:
            return max(self._running, key=_turn)
        first = min(self._running, key=_turn)
        num_held = self._count_pages()
        others = [running for running in self._running if running is not first] or [first]
        most = max({running.account for running in others}, key=lambda account: num_held[account] / account.weight)
        return max((running for running in others if running.account is most), key=_turn)

    def _choose_victims(
        self, account: TenantAccount, num_slots: int, num_pages: int, kept: set[Sequence]
    ) -> list[Sequence]:
        """Sequences to preempt so that num_slots and num_pages become free for the tenant; none if too many would be
        needed.

        They belong to tenants that have received at least as much service and keep their share of slots and pages.
        """
        num_held = self._count_pages()
        num_running = {owner: owner.num_running for owner in num_held}
        first = min(self._running, key=_turn)
        victims: list[Sequence] = []
        num_freed = 0
        for sequence in sorted(self._running, key=_turn, reverse=True):
            owner, num_its_pages = sequence.account, len(sequence.kv.held_pages)
            if owner is account or owner.service < account.service or sequence is first or sequence in kept:
                continue
            share = self._tenants.share_of(owner)
            if num_slots and num_running[owner] - 1 < share * self.max_running:
                continue
            if num_pages and num_held[owner] - num_its_pages < share * self._pool.num_pages:
                continue
            victims.append(sequence)
            num_running[owner] -= 1
            num_held[owner] -= num_its_pages
            num_freed += num_its_pages
            if len(victims) >= num_slots and num_freed >= num_pages:
                return victims
        return []

    def _count_pages(self) -> Counter[TenantAccount]:
        """Count pages by the tenant whose running sequences hold them. A page of two sequences counts twice."""
        num_held: Counter[TenantAccount] = Counter()
        for sequence in self._running:
            num_held[sequence.account] += len(sequence.kv.held_pages)
        return num_held

    def _give_pages(self, sequence: Sequence, pages: list[int]) -> None:
        sequence.kv.pages += pages
        sequence.capacity_tokens = len(sequence.kv.pages) // self._groups.count * self._page_size

    def _preempt(self, sequence: Sequence, *, requeue: bool = True) -> None:
        """Put a running sequence back into the wait queue. Its pages stay cached until others need them."""
        self._pool.mark_for_offload(sequence.kv.page_hashes[: sequence.kv.num_indexed_pages])
        self._stop_running(sequence)
        sequence.restart()
        if requeue:
            self._waiting.put(sequence)
        self._preempted.append(sequence)
        self.num_preemptions += 1

    def _stop_running(self, sequence: Sequence) -> None:
        del self._running[sequence]
        sequence.account.num_running -= 1
        self._waiting.unpark(self._prefix_cache.stop(sequence))
        self._pool.release(sequence.kv.held_pages)
        sequence.kv.drop_pages()
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)
            sequence.slot = None

    def _num_promised(self) -> int:
        """Pages that the running sequences' prompts will still take, of the pages that admission has reserved."""
        if self._groups.count == 1:
            return 0
        return sum(self._pages_later(sequence) for sequence in self._running)

    def _pages_later(self, sequence: Sequence) -> int:
        if sequence.num_computed >= sequence.num_given_tokens:
            return 0
        return self._groups.later_pages(sequence.num_given_tokens, sequence.kv.passed, len(sequence.kv.pages))

    def check_integrity(self) -> None:
        """Raises RuntimeError unless pages and slots are conserved and each parked sequence waits for a running one."""
        self._pool.check_integrity()
        holders = Counter(page for sequence in self._running for page in sequence.kv.held_pages)
        if len(holders) != self._pool.num_held:
            raise RuntimeError(f"{self._pool.num_held} pages are held, running sequences have {len(holders)}")
        if any(self._pool.num_holders(page) != count for page, count in holders.items()):
            raise RuntimeError("a page's holder count differs from the number of sequences that have it")
        slots = {sequence.slot for sequence in self._running}
        if None in slots or len(slots) != len(self._running) or len(slots) + len(self._free_slots) != self.max_running:
            raise RuntimeError(f"{len(slots)} slots are taken and {len(self._free_slots)} free of {self.max_running}")
        for sequence in self._running:
            if sequence.ended or self._groups.pages_for(sequence.num_computed) > len(sequence.kv.pages):
                raise RuntimeError("a running sequence has ended or computed more than its pages hold")
        for sequence in self._waiting.sequences():
            if sequence.kv.pages or sequence.slot is not None or sequence.ended or sequence in self._running:
                raise RuntimeError("a waiting sequence holds pages or a slot, or has ended, or runs")
        self._prefix_cache.check_integrity(self._running, self._waiting.parked_keys())
        self._waiting.check_integrity()
        self._tenants.check_integrity([*self._running, *self._waiting.sequences()])
        counts = Counter(sequence.account for sequence in self._running)
        if any(sequence.account.num_running != counts[sequence.account] for sequence in self._waiting.sequences()):
            raise RuntimeError("the running sequences of a tenant are not counted")


def _turn(sequence: Sequence) -> tuple[float, int, int, int]:
    return sequence.turn
