"""Admission: which of the waiting sequences start in a step."""

from __future__ import annotations

from penstock.backend.scheduling.preemption import Preemption
from penstock.backend.scheduling.running import RunningSequences
from penstock.backend.scheduling.step_plan import Chunk
from penstock.backend.scheduling.tenants import PREFILL_COST, Tenants
from penstock.backend.scheduling.wait_queue import Passed, WaitQueue
from penstock.backend.sequences.pictures import PictureKey
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.tenant_account import TenantAccount

_PREEMPTING_PART = 2
"""Others are preempted for a tenant that has less than half of its share. It gets the rest as they end."""
_MAX_PASSING = 16
"""Others may pass a sequence that does not fit with as many pages as it needs itself. Tenants that have received less
service, or have less than half of their share, may pass it with this many times as much."""
_LOOK_AGAIN_STEPS = 16
"""A sequence that does not fit is tried again after this many steps: more of its prefix may be cached by then."""


class AwaitedPictures:
    """A running sequence computes its prompt up to the next picture that is not encoded. One that would begin there
    does not start: it leaves the queue until the picture is encoded, so others pass it, and it holds no slot."""

    def __init__(self, running: RunningSequences, waiting: WaitQueue, tenants: Tenants) -> None:
        self._running = running
        self._waiting = waiting
        self._tenants = tenants
        self.num_sequences = 0
        """Sequences with pictures that have not ended; kept by the scheduler."""

    def keeps_waiting(self, sequence: Sequence, num_computed: int) -> bool:
        """Whether a sequence that `head` or `passed` has returned cannot start after so many tokens. Then it is taken
        out of its line until `release`."""
        missing = None if sequence.pictures is None else sequence.pictures.missing_from(num_computed)
        if missing is None or missing[1] > num_computed:
            return False
        self._waiting.take(sequence)
        self._waiting.awaiting[sequence] = missing[0]
        return True

    def release(self, key: PictureKey) -> None:
        """The picture has been encoded, or cannot be: the sequences that wait for it are looked at again."""
        awaiting = self._waiting.awaiting
        for sequence in [sequence for sequence, other in awaiting.items() if other == key]:
            del awaiting[sequence]
            self._waiting.put(sequence)

    def missing(self) -> list[tuple[Sequence, PictureKey]]:
        """Sequences with the next picture that each needs and that is not encoded. Those of tenants that have received
        less come first."""
        missing = list(self._waiting.awaiting.items())
        missing += [
            (sequence, found[0])
            for sequence in self._running.sequences
            if sequence.pictures is not None and (found := sequence.pictures.missing_from(sequence.num_computed))
        ]
        missing.sort(key=lambda entry: (entry[0].account.service, entry[0].turn))
        return missing

    def needed(self) -> set[PictureKey]:
        """The encoded pictures that running sequences need next."""
        running = [(each.pictures, each.num_computed) for each in self._running.sequences]
        return {key for pictures, first in running if pictures is not None for key in pictures.needed_from(first)}

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Its tenant is served with the encoding of a picture."""
        if self._tenants.are_several:
            self._tenants.charge(sequence.account, num_tokens * PREFILL_COST)


class Admission:
    """Starts waiting sequences as slots, pages and the token budget allow, between `begin_plan` and `end_plan`."""

    def __init__(
        self,
        running: RunningSequences,
        waiting: WaitQueue,
        tenants: Tenants,
        preemption: Preemption,
        pictures: AwaitedPictures,
        max_park_steps: int,
    ) -> None:
        """A sequence that waits for another's prefix does so while the prefix grows within max_park_steps steps."""
        self._running = running
        self._pool = running.pool
        self._groups = running.groups
        self._page_size = running.groups.page_size_tokens
        self._waiting = waiting
        self._tenants = tenants
        self._preemption = preemption
        self._pictures = pictures
        self._max_park_steps = max_park_steps
        self._num_plans = 0
        self.newcomers: list[Chunk] = []
        """Admitted in this plan."""
        self._displaced: list[Sequence] = []
        """Preempted for newcomers of this plan. They wait again when all of these have been admitted: one that started
        again in the same plan would have two rows in it."""

    def begin_plan(self, num_plans: int) -> None:
        """num_plans plans with rows were made before this one."""
        self._num_plans = num_plans
        self._waiting.unpark_overdue(num_plans)
        self.newcomers = []

    def end_plan(self) -> None:
        for sequence in self._displaced:
            self._waiting.put(sequence)
        self._displaced.clear()

    def may_admit_any(self) -> bool:
        """Whether looking at the wait queue can have an effect. Cheap: called in every plan."""
        return len(self._waiting) > self._waiting.num_parked and (
            bool(self._running.num_free_slots) or self._tenants.are_several
        )

    def admit(self, budget: int, *, before: list[Sequence] | None = None, in_parts: bool = False) -> int:
        """Start waiting sequences while budget, slots and pages last. Return the remaining budget.

        before: only sequences of tenants that have received no more service than the first of these sequences, and have
        none of them. in_parts: a prompt that does not fit the budget gets half of it, so that a shorter one behind it
        fits.
        """
        busy = {sequence.account for sequence in before or ()}
        if before is None:
            for sequence, passed in self._waiting.passed():
                if budget > 0 and self._is_due(passed) and self._may_start(sequence):
                    num_left = self._start_if_it_fits(sequence, budget, in_parts=in_parts)
                    passed.again_step = self._num_plans + _LOOK_AGAIN_STEPS
                    passed.num_available = self._pool.num_available - min(0, num_left)
                    budget = num_left if num_left >= 0 else budget
        while budget > 0 and (head := self._waiting.head()) is not None:
            if before and (head.account in busy or head.account.service > before[0].account.service):
                break
            if not self._may_start(head):
                break
            num_left = self._start_if_it_fits(head, budget, in_parts=in_parts)
            if num_left >= 0:
                budget = num_left
            elif self._running.num_free_slots and self._waiting.can_pass(head):
                num_pages = self._groups.most_pages(len(head.tokens) + 1)
                num_available = self._pool.num_available - num_left
                self._waiting.pass_over(head, Passed(num_pages, num_available, self._num_plans + _LOOK_AGAIN_STEPS))
            else:
                break
        return budget

    def _is_due(self, passed: Passed) -> bool:
        is_due = self._pool.num_available >= passed.num_available or self._num_plans >= passed.again_step
        return is_due or not self._running.sequences

    def _may_start(self, sequence: Sequence) -> bool:
        """Whether there may be a slot for the sequence, and it may pass those before it that do not fit. A slot is kept
        free for each parked sequence, because it came first. This also bounds the number of sequences of one prefix
        that are tried in one plan."""
        is_poor = self._is_poor(sequence.account)
        if self._running.num_free_slots <= self._waiting.num_parked and not is_poor:
            return False
        account = sequence.account
        for other, passed in self._waiting.passed():
            if other is sequence:
                break
            goes_first = other.account is not account and (is_poor or account.service < other.account.service)
            if other.parking.num_pages_passed >= (_MAX_PASSING if goes_first else 1) * passed.num_pages:
                return False
        return True

    def _is_poor(self, account: TenantAccount) -> bool:
        """With one more slot the tenant has at most half of its share, or it has none."""
        if not self._tenants.are_several:
            return False
        num_due = self._tenants.share_of(account) * self._running.max_running / _PREEMPTING_PART
        return account.num_running + 1 <= max(1.0, num_due)

    def _start_if_it_fits(self, sequence: Sequence, budget: int, *, in_parts: bool) -> int:
        """Start the head of the queue or a passed sequence, or park it. Returns the remaining budget. If there is no
        room, returns minus the missing pages, or -1 without a free slot."""
        prefix = self._running.prefix_cache.find(sequence)
        num_available = prefix.num_full_pages * self._page_size + prefix.num_copied_tokens
        if prefix.awaited is not None and sequence.parking.may_wait(
            num_available, self._num_plans, self._max_park_steps
        ):
            self._waiting.take(sequence)
            self._running.prefix_cache.expect(prefix.awaited)
            self._waiting.park(sequence, prefix.awaited, self._num_plans + self._max_park_steps)
            return budget
        if self._pictures.keeps_waiting(sequence, num_available):
            return budget
        # All its known tokens and the next one must fit now, and so must the pages that others take before its
        # first step is applied. Otherwise it could be preempted before it makes progress.
        num_tokens = min(len(sequence.tokens) + 1, sequence.max_total_tokens)
        num_listed = self._groups.first_pages(num_tokens, prefix.passed)
        num_new = num_listed - prefix.num_held_or_passed * self._groups.count
        num_later = self._groups.later_pages(num_tokens, prefix.passed, num_listed) + self._running.num_promised()
        num_left = self._pool.num_available - num_new - num_later - sum(map(self._pool.is_idle, prefix.pages))
        num_missing = -num_left if num_left < 0 else 0 if self._running.is_enough(num_left, sequence) else 1
        if num_missing or not self._running.num_free_slots:
            if not self._take_from_others(sequence, num_missing):
                return -max(1, num_missing)
            if not self._waiting.is_next(sequence):  # the preemption has unparked one that comes before it
                return budget
            return self._start_if_it_fits(sequence, budget, in_parts=in_parts)
        may_copy = num_left > 0 or not self._pool.is_idle(prefix.copy_source)
        if not (may_copy and sequence.may_begin(num_available, budget)):
            may_copy, num_available = False, num_available - prefix.num_copied_tokens
            if self._pictures.keeps_waiting(sequence, num_available):
                return budget
            if prefix.num_on_host and not sequence.may_begin(num_available, budget):
                return 0  # only a step with a row of the sequence brings its pages back
        passes, num_available = list(self._waiting.passed_before(sequence)), self._pool.num_available
        self._waiting.take(sequence)
        sequence.goes_first = False
        sequence.account.leave_round(sequence.group, sequence.round, has_started=True)
        self._running.start(sequence, prefix, num_new, may_copy=may_copy)
        for other in passes:
            other.parking.num_pages_passed += num_available - self._pool.num_available
        num_missing = sequence.num_ready_tokens - sequence.num_computed
        grant = num_missing if num_missing <= budget else (budget + 1) // 2 if in_parts else budget
        grant = sequence.whole_chunk(grant, budget)
        if grant:
            self.newcomers.append((sequence, grant))
        if self._tenants.are_several:
            self._tenants.charge(sequence.account, grant * PREFILL_COST)
        return budget - grant

    def _take_from_others(self, sequence: Sequence, num_pages: int) -> bool:
        """Preempt sequences of tenants over their share, if the sequence's tenant stays at half of its own."""
        account = sequence.account
        if not self._is_poor(account):
            return False
        num_held = sum(len(other.kv.held_pages) for other in self._running.sequences if other.account is account)
        num_due = self._tenants.share_of(account) * self._pool.num_pages / _PREEMPTING_PART
        if num_pages and num_held + self._groups.most_pages(len(sequence.tokens) + 1) > num_due:
            return False
        num_slots = 0 if self._running.num_free_slots else 1
        newcomers = {newcomer for newcomer, _ in self.newcomers}
        victims = self._preemption.choose_victims(account, num_slots, num_pages, newcomers)
        for victim in victims:
            self._preemption.preempt(victim, requeue=False)
        self._displaced += victims
        return bool(victims)
