"""Decides which sequences run in the next step, and how many tokens of each. Knows pages and slots, no model, no link.

There is no prefill phase and no decode phase. A step takes the running sequences first: decodes, then those with more
tokens to compute. Then it admits waiting sequences as slots, pages and the token budget allow. Tenants take turns
(`tenants`). The unused share of one goes to another that waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from penstock.backend.kv_cache.host_offload import HostOffload
from penstock.backend.kv_cache.kv_groups import KvGroups
from penstock.backend.kv_cache.page_pool import PagePool
from penstock.backend.kv_cache.state_checkpoints import StateCheckpoints
from penstock.backend.scheduling.admission import Admission, AwaitedPictures
from penstock.backend.scheduling.drafting import Drafting
from penstock.backend.scheduling.outlook import Outlook
from penstock.backend.scheduling.preemption import Preemption
from penstock.backend.scheduling.running import RunningSequences
from penstock.backend.scheduling.step_plan import Chunk, Plan, share_out
from penstock.backend.scheduling.tenants import PREFILL_COST, Tenants
from penstock.backend.scheduling.wait_queue import WaitQueue
from penstock.backend.sequences.sequence import Sequence

_SHORT_STEP_PART = 4
"""A short step computes at most a quarter of the usual tokens of prompts."""
_STEPS_PER_SHORT_STEP = 4
"""At most one step in four is short: the others keep the throughput."""


class Scheduler:
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
        states: StateCheckpoints | None = None,
        kv_windows: tuple[int | None, ...] = (None,),
        drafting: Drafting | None = None,
    ) -> None:
        """A sequence that waits for another's prefix does so while the prefix grows within max_park_steps steps.
        num_plans_ahead, states: see `RunningSequences`. kv_windows: see `PassSpec`. drafting: None without drafts.
        After a plan with drafts, `plan` is called when its step has been applied."""
        keeps_state = states is not None
        groups = KvGroups.of(page_size_tokens, kv_windows, max_batch_tokens, num_plans_ahead, keeps_state=keeps_state)
        self._pool = pool
        self.drafting = drafting
        self._tenants = Tenants()
        self._waiting = WaitQueue(self._tenants)
        self._running = RunningSequences(pool, groups, max_running, num_plans_ahead, states)
        self._preemption = Preemption(self._running, self._waiting, self._tenants)
        self.pictures = AwaitedPictures(self._running, self._waiting, self._tenants)
        self._admission = Admission(
            self._running, self._waiting, self._tenants, self._preemption, self.pictures, max_park_steps
        )
        self._max_batch_tokens = max_batch_tokens
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
        self._outlook: Outlook | None = None
        """Until the next plan, newcomer or end."""

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
        self.pictures.num_sequences += sequence.pictures is not None
        self._num_precedences_left -= goes_first
        self._outlook = None

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended, in any state. Its pages and slot are free at once."""
        sequence.ended = True
        sequence.generation += 1
        if sequence.order < 0:  # it was never added
            return
        self._outlook = None
        self.pictures.num_sequences -= sequence.pictures is not None
        if sequence in self._running.sequences:
            self._waiting.unpark(self._running.stop(sequence))
        else:
            self._waiting.forget(sequence)
            sequence.account.leave_round(sequence.group, sequence.round, has_started=False)
        self._tenants.close(sequence.account)
        if sequence.embeddings is not None:  # no other sequence can find their KV
            self._running.prefix_cache.discard(sequence)

    def plan(self) -> Plan:
        """Plan the next step; a plan without rows if there is nothing to do."""
        self._outlook = None
        if chunks := self._choose_bisected():
            return self._make_plan([], chunks)
        self._admission.begin_plan(self._num_plans)
        if self._tenants.has_idle:
            self._tenants.forget_idle(self._waiting.floor())
        num_preemptions = self.num_preemptions
        decodes, unfinished = self._choose_decodes(self._max_batch_tokens)
        budget = min(self._max_batch_tokens - len(decodes), self._max_prompt_tokens())
        for sequence in unfinished:  # a rewound sequence may lack a page for its last token, one with a window more
            self._find_pages(sequence, min(sequence.num_given_tokens, sequence.num_computed + budget))
        unfinished = [sequence for sequence in unfinished if sequence.slot is not None]
        chunks = self._choose_chunks(unfinished, budget, may_admit=self.num_preemptions == num_preemptions)
        self._admission.end_plan()
        if self.num_preemptions != num_preemptions:
            decodes = [sequence for sequence in decodes if sequence.slot is not None]
            chunks = [chunk for chunk in chunks if chunk[0].slot is not None]
        has_prompts = bool(chunks or self._admission.newcomers)  # such a step is long, and full
        drafts = self._choose_drafts(decodes) if decodes and not has_prompts else {}
        if self._tenants.are_several:
            self._tenants.charge_decodes(decodes)
            for sequence, num_tokens in [*chunks, *((sequence, len(tokens)) for sequence, tokens in drafts.items())]:
                self._tenants.charge(sequence.account, num_tokens * PREFILL_COST)
        plan = self._make_plan(decodes, chunks + self._admission.newcomers, drafts)
        self._num_plans += bool(plan)
        return plan

    def next_decodes(self) -> Collection[Sequence]:
        """The running sequences, unless the next plan has other work than they: those may decode in it."""
        is_prompt_next = bool(self._waiting) and self.num_free_slots > 0
        return () if is_prompt_next or self._bisections else self._running.sequences

    def outlook(self) -> Outlook:
        """See `ISequenceScheduler`."""
        if self._outlook is None:
            self._outlook = Outlook(self._running, self._waiting, self._tenants, self._max_batch_tokens)
        return self._outlook

    def _max_prompt_tokens(self) -> int:
        """The most tokens of prompts in the next step. A short step is planned when it will serve a short prompt of a
        tenant that has nothing running: the first token of its answer comes when the step ends."""
        may_be_short = not self.pictures.num_sequences  # a picture may have to be computed whole
        if self._tenants.are_several and may_be_short and self._num_plans >= self._no_short_step_before:
            head, num_tokens = self._waiting.head(), self._max_batch_tokens // _SHORT_STEP_PART
            if head is not None and not head.account.num_running and len(head.tokens) <= num_tokens:
                self._no_short_step_before = self._num_plans + _STEPS_PER_SHORT_STEP
                return num_tokens
        return self._max_batch_tokens

    def _choose_decodes(self, budget: int) -> tuple[list[Sequence], list[Sequence]]:
        """Advance the sequences that decode. Return them, and the running ones with given tokens left to compute."""
        decodes: list[Sequence] = []
        need_pages, unfinished = [], []
        for sequence in self._running.sequences:
            end = sequence.num_computed + 1
            if end <= sequence.num_given_tokens:
                is_ready = end < sequence.num_given_tokens or not sequence.awaits_mask
                if is_ready and end <= sequence.num_ready_tokens:
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

    def _choose_drafts(self, decodes: list[Sequence]) -> dict[Sequence, list[int]]:
        """Drafts within the token budget, and in pages that no other sequence needs next."""
        if self.drafting is None:
            return {}
        left, drafts = self._max_batch_tokens - len(decodes), {}
        num_spare = self._pool.num_available - len(decodes) * self._running.groups.count
        chosen = self.drafting.choose(decodes)
        for sequence, tokens in chosen.items():
            # No state is kept within drafts.
            end = min(sequence.num_computed + min(len(tokens), left), sequence.kv.next_border - 1)
            if 0 < (missing := self._running.missing_pages(sequence, end)) <= num_spare:
                self._running.grow(sequence, missing)
                num_spare -= missing
            kept = tokens[: max(0, min(end, sequence.capacity_tokens) - sequence.num_computed)]
            if kept:
                drafts[sequence] = kept
                sequence.kv.drafts_end = sequence.num_computed + len(kept)
                left -= len(kept)
        return drafts

    def _choose_chunks(self, unfinished: list[Sequence], budget: int, *, may_admit: bool) -> list[Chunk]:
        """Share the budget among running sequences with given tokens left to compute, and newcomers. Tenants that have
        received less come first. Returns the chunks of the former."""
        may_admit = may_admit and self._admission.may_admit_any()
        if not unfinished:
            if may_admit:
                self._admission.admit(budget)
            return []
        if self._tenants.are_several:
            unfinished.sort(key=lambda sequence: sequence.account.service)
            if may_admit:
                budget = self._admission.admit(budget, before=unfinished)
                unfinished = [sequence for sequence in unfinished if sequence.slot is not None]
        needs = [sequence.num_ready_tokens - sequence.num_computed for sequence in unfinished]
        num_of_first = len(unfinished)
        if self._tenants.are_several:
            num_of_first = sum(sequence.account is unfinished[0].account for sequence in unfinished)
        grants, left = share_out(needs, budget, num_of_first_tenant=num_of_first, someone_waits=may_admit)
        left += sum(grants)
        for index, sequence in enumerate(unfinished):  # the first ones may take what others need for a whole picture
            grants[index] = sequence.whole_chunk(min(grants[index], left), left)
            left -= grants[index]
        if may_admit and left:
            left = self._admission.admit(left, in_parts=left < budget)
        chunks = []
        for sequence, need, grant in zip(unfinished, needs, grants, strict=True):
            chunk = sequence.whole_chunk(grant + min(left, need - grant), grant + left)
            left -= chunk - grant
            if chunk:
                chunks.append((sequence, chunk))
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
                end = min(end, sequence.num_ready_tokens)
                length = sequence.whole_chunk(min(end - sequence.num_computed, budget), budget)
                if length > 0 and not sequence.ended and self._find_pages(sequence, sequence.num_computed + length):
                    chunks.append((sequence, length))
                    budget -= length
            if chunks := [chunk for chunk in chunks if chunk[0].slot is not None]:  # others took the pages of some
                return chunks
            self._bisections.popleft()
        return []

    def _make_plan(
        self, decodes: list[Sequence], chunks: list[Chunk], drafts: dict[Sequence, list[int]] | None = None
    ) -> Plan:
        """A plan from decodes, which are advanced already, and chunks, which are advanced here. There are no chunks
        with drafts."""
        plan = Plan(decodes, lengths=[1] * len(decodes), num_decodes=len(decodes))
        plan.logit_rows = list(range(len(decodes)))
        if drafts:
            plan.sequences = sorted(decodes, key=drafts.__contains__)
            plan.drafts = drafts
            plan.num_decodes -= len(drafts)
        # The admission of others may have brought a sequence's next checkpoint nearer.
        chunks = [(each, min(num_tokens, each.num_ready_tokens - each.num_computed)) for each, num_tokens in chunks]
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
        self._running.describe_pages(plan)
        return plan

    def _find_pages(self, sequence: Sequence, num_tokens: int) -> bool:
        """Get pages for num_tokens of a running sequence, preempting others if necessary. False if it is preempted
        itself."""
        if sequence.slot is None:
            return False
        missing = self._running.missing_pages(sequence, num_tokens)
        while missing > self._pool.num_available:
            last = self._preemption.choose_victim()
            self._preemption.preempt(last)
            if last is sequence:
                return False
        if missing > 0:
            self._running.grow(sequence, missing)
        return True

    # Results

    def note_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that the step that computed the sequence's first num_tokens has been applied. Sequences that wait for
        pages that it has filled are unparked."""
        self._waiting.unpark(self._running.note_computed(sequence, num_tokens))

    def rewind(self, sequence: Sequence, num_computed: int) -> None:
        """See `RunningSequences`."""
        self._running.rewind(sequence, num_computed)

    def invalidate_tenant(self, sequence: Sequence) -> None:
        """Make all cached pages of the sequence's tenant unfindable.

        Its logits were bad, so its pages may be bad, and with them the pages that it found or that others copied from
        it.
        """
        self._running.prefix_cache.invalidate_tenant(sequence.salt)

    def leave_pages(self) -> None:
        """Leave the pages of the running sequences to the next backend, which is ready."""
        self._running.leave_pages()

    def take_saves(self) -> tuple[tuple[int, int], ...]:
        """See `RunningSequences`. Call it when that step is launched."""
        return self._running.take_saves()

    def note_step_ended(self) -> None:
        self._running.note_step_ended()

    def take_preempted(self) -> list[Sequence]:
        """See `ISequenceScheduler`."""
        return self._preemption.take_preempted()

    # Counts

    @property
    def has_work(self) -> bool:
        """Whether `plan` may return rows; see `ISequenceScheduler`."""
        return bool(self._running.sequences or self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running.sequences)

    @property
    def num_preemptions(self) -> int:
        return self._preemption.count

    @property
    def num_free_slots(self) -> int:
        return self._running.num_free_slots

    @property
    def num_pages_held(self) -> int:
        return self._pool.num_held

    @property
    def num_pages_idle(self) -> int:
        return self._pool.num_idle

    @property
    def checkpoint_bytes(self) -> int:
        states = self._running.states
        return 0 if states is None else states.num_bytes

    @property
    def host_offload(self) -> HostOffload:
        """The pool's host pages, for metrics."""
        return self._pool.host_offload

    def num_waiting_of(self, tenant: bytes) -> int:
        return self._tenants.num_waiting_of(tenant)

    def share_of(self, tenant: bytes, weight: float) -> float:
        """See `ISequenceScheduler`."""
        return self._tenants.share_with(tenant, weight)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless pages and slots are conserved and each parked sequence waits for a running one."""
        waiting = self._waiting.sequences()
        self._running.check_integrity(waiting, self._waiting.parked_keys())
        self._waiting.check_integrity()
        self._tenants.check_integrity([*self._running.sequences, *waiting])
