"""Decides which sequences run in the next step, and how many tokens of each. Knows pages and slots, no model, no link.

There is no prefill phase and no decode phase. A step takes the running sequences first: decodes, then those with more
tokens to compute. Then it admits waiting sequences as slots, pages and the token budget allow. Tenants take turns
(`tenants`). The unused share of one goes to another that waits.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from penstock.backend.kv_cache.kv_groups import KvGroups
from penstock.backend.scheduling.outlook import Outlook, those_before
from penstock.backend.scheduling.running import RunningSequences
from penstock.backend.scheduling.step_budget import share_out
from penstock.backend.scheduling.step_plan import Plan
from penstock.backend.scheduling.tenants import PREFILL_COST
from penstock.backend.scheduling.wait_queue import Passed

if TYPE_CHECKING:
    from penstock.backend.kv_cache.page_pool import PagePool
    from penstock.backend.sequences.sequence import Sequence
    from penstock.backend.sequences.tenant import TenantAccount

    Chunk: TypeAlias = tuple[Sequence, int]
    """A sequence with known tokens that are not computed, and how many of them the step computes."""

_PREEMPTING_PART = 2
"""Others are preempted for a tenant that has less than half of its share. It gets the rest as they end."""
_MAX_PASSING = 16
"""Others may pass a sequence that does not fit with as many pages as it needs itself. Tenants that have received less
service, or have less than half of their share, may pass it with this many times as much."""
_SHORT_STEP_PART = 4
"""A short step computes at most a quarter of the usual tokens of prompts."""
_STEPS_PER_SHORT_STEP = 4
"""At most one step in four is short: the others keep the throughput."""
_LOOK_AGAIN_STEPS = 16
"""A sequence that does not fit is tried again after this many steps: more of its prefix may be cached by then."""


class Scheduler(RunningSequences):
    """All sequences that have not ended. Each is either waiting or running."""

    def __init__(
        self,
        pool: PagePool,
        page_size_tokens: int,
        max_running: int,
        max_batch_tokens: int,
        max_park_steps: int = 64,
        num_plans_ahead: int = 1,
        *,
        keeps_state: bool = False,
        kv_windows: tuple[int | None, ...] = (None,),
    ) -> None:
        """A sequence that waits for another's prefix does so while the prefix grows within max_park_steps steps.
        num_plans_ahead, keeps_state: see `RunningSequences`. kv_windows: see `PassSpec`."""
        groups = KvGroups.of(page_size_tokens, kv_windows, max_batch_tokens, num_plans_ahead, keeps_state=keeps_state)
        super().__init__(pool, groups, max_running, num_plans_ahead, keeps_state=keeps_state)
        self._max_batch_tokens = max_batch_tokens
        self._max_park_steps = max_park_steps
        self._bisections: deque[list[tuple[Sequence, int]]] = deque()
        """Parts of failed steps: sequences, each with the number of tokens that it had after the step. A part runs
        before anything else, in steps of its own, until they have these tokens again."""
        self._num_plans = 0
        """Plans with rows."""
        self._no_short_step_before = 0
        """Compared with _num_plans."""
        self._num_added = 0
        self._num_precedences_left = max_running
        """Sequences that may still go before all others because they ran in an earlier backend. No more than this ran
        there at a time, and no more can frontends that lie gain in this backend's life."""
        self._newcomers: list[Chunk] = []
        """Admitted in this plan."""
        self._displaced: list[Sequence] = []
        """Preempted for newcomers of this plan. They wait again when all of these have been admitted: one that started
        again in the same plan would have two rows in it."""

    def add(self, sequence: Sequence) -> None:
        """Put the sequence into the wait queue. The caller has checked that the pool can hold it. After an error it has
        not been added, but `remove` may still be called."""
        order, goes_first = self._num_added, bool(self._num_precedences_left) and sequence.has_run_before
        account = sequence.account = self._tenants.open(sequence.tenant, sequence.weight)
        try:
            sequence.order, sequence.goes_first = order, goes_first
            sequence.round = account.next_round(sequence.group)
            self._waiting.put(sequence)
        except Exception:  # whatever it is, it is raised again: the caller fails the sequence's requests
            sequence.order, sequence.goes_first = -1, False
            account.leave_round(sequence.group, sequence.round, has_started=False)
            self._tenants.close(account)
            raise
        self._num_added += 1
        self._num_precedences_left -= goes_first

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended, in any state. Its pages and slot are free at once."""
        sequence.ended = True
        sequence.generation += 1
        if sequence.order < 0:  # it was never added
            return
        if sequence in self._running:
            self._stop_running(sequence)
        else:
            self._waiting.forget(sequence)
            sequence.account.leave_round(sequence.group, sequence.round, has_started=False)
        self._tenants.close(sequence.account)
        if sequence.embeddings is not None:  # no other sequence can find their KV
            self._prefix_cache.discard(sequence)

    def plan(self) -> Plan:
        """Plan the next step; a plan without rows if there is nothing to do."""
        if chunks := self._choose_bisected():
            return self._make_plan([], chunks)
        self._waiting.unpark_overdue(self._num_plans)
        if self._tenants.has_idle:
            self._tenants.forget_idle(self._waiting.floor())
        self._newcomers = []
        num_preemptions = self.num_preemptions
        decodes, unfinished = self._choose_decodes(self._max_batch_tokens)
        budget = min(self._max_batch_tokens - len(decodes), self._max_prompt_tokens())
        for sequence in unfinished:  # a rewound sequence may lack a page for its last token, one with a window more
            self._find_pages(sequence, min(sequence.num_given_tokens, sequence.num_computed + budget))
        unfinished = [sequence for sequence in unfinished if sequence.slot is not None]
        chunks = self._choose_chunks(unfinished, budget, may_admit=self.num_preemptions == num_preemptions)
        for sequence in self._displaced:
            self._waiting.put(sequence)
        self._displaced.clear()
        if self.num_preemptions != num_preemptions:
            decodes = [sequence for sequence in decodes if sequence.slot is not None]
            chunks = [chunk for chunk in chunks if chunk[0].slot is not None]
        if self._tenants.are_several:
            self._tenants.charge_decodes(decodes)
            for sequence, num_tokens in chunks:
                self._tenants.charge(sequence.account, num_tokens * PREFILL_COST)
        plan = self._make_plan(decodes, chunks + self._newcomers)
        self._num_plans += bool(plan)
        return plan

    def outlook(self, sequence: Sequence) -> Outlook:
        """See `ISequenceScheduler`."""
        account, turn = sequence.account, sequence.turn
        if sequence.order < 0:
            account = self._tenants.find(sequence.tenant, sequence.weight)
            turn = sequence.rank, sequence.admitted_ns, account.round + 1, self._num_added
        prefix = self._prefix_cache.find(sequence)
        num_cached = prefix.num_full_pages * self._page_size + prefix.num_copied_tokens
        return Outlook(
            list(self._running),
            those_before(sequence, turn, account, self._waiting.sequences()),
            num_cached,
            self.max_running,
            self._pool.num_pages,
            self._groups,
            self._max_batch_tokens,
        )

    def _max_prompt_tokens(self) -> int:
        """The most tokens of prompts in the next step. A short step is planned when it will serve a short prompt of a
        tenant that has nothing running: the first token of its answer comes when the step ends."""
        if self._tenants.are_several and self._num_plans >= self._no_short_step_before:
            head, num_tokens = self._waiting.head(), self._max_batch_tokens // _SHORT_STEP_PART
            if head is not None and not head.account.num_running and len(head.tokens) <= num_tokens:
                self._no_short_step_before = self._num_plans + _STEPS_PER_SHORT_STEP
                return num_tokens
        return self._max_batch_tokens

    def _choose_decodes(self, budget: int) -> tuple[list[Sequence], list[Sequence]]:
        """Advance the sequences that decode. Return them, and the running ones with given tokens left to compute."""
        decodes: list[Sequence] = []
        need_pages, unfinished = [], []
        for sequence in self._running:
            end = sequence.num_computed + 1
            if end <= sequence.num_given_tokens:
                if end < sequence.num_given_tokens or not sequence.awaits_mask:
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

    def _choose_chunks(self, unfinished: list[Sequence], budget: int, *, may_admit: bool) -> list[Chunk]:
        """Share the budget among running sequences with given tokens left to compute, and newcomers. Tenants that have
        received less come first. Returns the chunks of the former."""
        may_admit = may_admit and self._may_admit_any()
        if not unfinished:
            if may_admit:
                self._admit(budget)
            return []
        if self._tenants.are_several:
            unfinished.sort(key=lambda sequence: sequence.account.service)
            if may_admit:
                budget = self._admit(budget, before=unfinished)
                unfinished = [sequence for sequence in unfinished if sequence.slot is not None]
        needs = [sequence.num_given_tokens - sequence.num_computed for sequence in unfinished]
        num_of_first = len(unfinished)
        if self._tenants.are_several:
            num_of_first = sum(sequence.account is unfinished[0].account for sequence in unfinished)
        grants, left = share_out(needs, budget, num_of_first_tenant=num_of_first, someone_waits=may_admit)
        if may_admit and left:
            left = self._admit(left, in_parts=left < budget)
        chunks = []
        for sequence, need, grant in zip(unfinished, needs, grants, strict=True):
            extra = min(left, need - grant)
            left -= extra
            if grant + extra:
                chunks.append((sequence, grant + extra))
        return chunks

    def bisect(self, chunks: list[Chunk]) -> None:
        """Rewind the rows of a failed step to before it. Each half then runs in steps of its own, before other work."""
        ends = [(sequence, sequence.num_applied + length) for sequence, length in chunks]
        for sequence, _ in chunks:
            self.rewind(sequence, sequence.num_applied)
            sequence.kv.num_cached = min(sequence.kv.num_cached, sequence.num_computed)
        middle = (len(ends) + 1) // 2
        self._bisections.extendleft(half for half in (ends[middle:], ends[:middle]) if half)

    def _choose_bisected(self) -> list[Chunk]:
        """The next tokens of the first part of a failed step that has tokens left."""
        while self._bisections:
            chunks, budget = [], self._max_batch_tokens
            for sequence, end in self._bisections[0]:
                if not sequence.ended and (length := min(end - sequence.num_computed, budget)) > 0:
                    chunks.append((sequence, length))
                    budget -= length
            if chunks:
                return chunks
            self._bisections.popleft()
        return []

    def _make_plan(self, decodes: list[Sequence], chunks: list[Chunk]) -> Plan:
        """A plan from decodes, which are advanced already, and chunks, which are advanced here."""
        plan = Plan(decodes, lengths=[1] * len(decodes), num_decodes=len(decodes))
        plan.logit_rows = list(range(len(decodes)))
        for sequence, num_tokens in sorted(chunks, key=lambda chunk: chunk[1] > 1):
            if (span := sequence.next_scored(num_tokens)) is not None:
                plan.scored[sequence] = span
            sequence.num_computed += num_tokens
            if sequence.num_computed == len(sequence.tokens):
                (plan.logit_rows if sequence.pooled is None else plan.pooled_rows).append(len(plan))
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

    # Admission

    def _may_admit_any(self) -> bool:
        """Whether looking at the wait queue can have an effect. Cheap: called in every plan."""
        return len(self._waiting) > self._waiting.num_parked and (bool(self._free_slots) or self._tenants.are_several)

    def _admit(self, budget: int, *, before: list[Sequence] | None = None, in_parts: bool = False) -> int:
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
            elif self._free_slots and self._waiting.can_pass(head):
                num_pages = self._groups.most_pages(len(head.tokens) + 1)
                num_available = self._pool.num_available - num_left
                self._waiting.pass_over(head, Passed(num_pages, num_available, self._num_plans + _LOOK_AGAIN_STEPS))
            else:
                break
        return budget

    def _is_due(self, passed: Passed) -> bool:
        is_due = self._pool.num_available >= passed.num_available or self._num_plans >= passed.again_step
        return is_due or not self._running

    def _may_start(self, sequence: Sequence) -> bool:
        """Whether there may be a slot for the sequence, and it may pass those before it that do not fit. A slot is kept
        free for each parked sequence, because it came first. This also bounds the number of sequences of one prefix
        that are tried in one plan."""
        is_poor = self._is_poor(sequence.account)
        if len(self._free_slots) <= self._waiting.num_parked and not is_poor:
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
        num_due = self._tenants.share_of(account) * self.max_running / _PREEMPTING_PART
        return account.num_running + 1 <= max(1.0, num_due)

    def _start_if_it_fits(self, sequence: Sequence, budget: int, *, in_parts: bool) -> int:
        """Start the head of the queue or a passed sequence, or park it. Returns the remaining budget. If there is no
        room, returns minus the missing pages, or -1 without a free slot."""
        prefix = self._prefix_cache.find(sequence)
        num_available = prefix.num_full_pages * self._page_size + prefix.num_copied_tokens
        if prefix.awaited is not None and sequence.parking.may_wait(
            num_available, self._num_plans, self._max_park_steps
        ):
            self._waiting.take(sequence)
            self._waiting.park(sequence, prefix.awaited, self._num_plans + self._max_park_steps)
            return budget
        # All its known tokens and the next one must fit now, and so must the pages that others take before its
        # first step is applied. Otherwise it could be preempted before it makes progress.
        num_tokens = min(len(sequence.tokens) + 1, sequence.max_total_tokens)
        num_listed = self._groups.first_pages(num_tokens, prefix.passed)
        num_new = num_listed - prefix.num_held_or_passed * self._groups.count
        num_later = self._groups.later_pages(num_tokens, prefix.passed, num_listed) + self._num_promised()
        num_left = self._pool.num_available - num_new - num_later - sum(map(self._pool.is_idle, prefix.pages))
        num_missing = -num_left if num_left < 0 else 0 if self._is_enough(num_left, sequence) else 1
        if num_missing or not self._free_slots:
            if not self._take_from_others(sequence, num_missing):
                return -max(1, num_missing)
            if not self._waiting.is_next(sequence):  # the preemption has unparked one that comes before it
                return budget
            return self._start_if_it_fits(sequence, budget, in_parts=in_parts)
        passes, num_available = list(self._waiting.passed_before(sequence)), self._pool.num_available
        self._waiting.take(sequence)
        self._start(sequence, prefix, num_new, may_copy=num_left > 0 or not self._pool.is_idle(prefix.copy_source))
        for other in passes:
            other.parking.num_pages_passed += num_available - self._pool.num_available
        num_missing = sequence.num_given_tokens - sequence.num_computed
        grant = num_missing if num_missing <= budget else (budget + 1) // 2 if in_parts else budget
        self._newcomers.append((sequence, grant))
        if self._tenants.are_several:
            self._tenants.charge(sequence.account, grant * PREFILL_COST)
        return budget - grant

    def _take_from_others(self, sequence: Sequence, num_pages: int) -> bool:
        """Preempt sequences of tenants over their share, if the sequence's tenant stays at half of its own."""
        account = sequence.account
        if not self._is_poor(account):
            return False
        num_held = sum(len(other.kv.held_pages) for other in self._running if other.account is account)
        num_due = self._tenants.share_of(account) * self._pool.num_pages / _PREEMPTING_PART
        if num_pages and num_held + self._groups.most_pages(len(sequence.tokens) + 1) > num_due:
            return False
        num_slots = 0 if self._free_slots else 1
        kept = {newcomer for newcomer, _ in self._newcomers}
        victims = self._choose_victims(account, num_slots, num_pages, kept)
        for victim in victims:
            self._preempt(victim, requeue=False)
        self._displaced += victims
        return bool(victims)
