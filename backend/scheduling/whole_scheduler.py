"""Schedules sequences that are computed whole, in one step each, for passes without a KV cache."""

from __future__ import annotations

from collections import Counter, deque

from penstock.backend.kv_cache.host_offload import HostOffload
from penstock.backend.scheduling.step_plan import Plan
from penstock.backend.scheduling.tenants import PREFILL_COST, Tenants
from penstock.backend.scheduling.wait_queue import Passed, WaitQueue
from penstock.backend.sequences.sequence import Sequence


class WholeScheduler:
    """A step takes the next sequences as long as they fit its tokens.

    Shorter sequences pass one that does not fit the rest of a step; it is the first of the next step. A sequence longer
    than a step has a step of its own. Tenants take turns as in `Scheduler`. There are no pages, and nothing is
    preempted. A slot is a row's number in its step.
    """

    def __init__(self, max_rows: int, max_batch_tokens: int) -> None:
        """max_rows limits each step; max_batch_tokens limits a step with several rows."""
        self._max_rows = max_rows
        self._max_batch_tokens = max_batch_tokens
        self._tenants = Tenants()
        self._waiting = WaitQueue(self._tenants)
        self._running: dict[Sequence, None] = {}
        """In plans that have not been applied yet."""
        self._bisections: deque[list[Sequence]] = deque()
        """Parts of failed steps. Each runs before anything else, as a step of its own."""
        self._num_added = 0
        self.num_preemptions = 0
        self.host_offload = HostOffload(0)

    # Called by the engine

    def add(self, sequence: Sequence) -> None:
        """See `ISequenceScheduler`."""
        account = sequence.account = self._tenants.open(sequence.tenant, sequence.weight)
        try:
            sequence.order, sequence.round = self._num_added, account.next_round(sequence.group)
            self._waiting.put(sequence)
        except Exception:  # as in `Scheduler.add`
            sequence.order = -1
            account.leave_round(sequence.group, sequence.round, has_started=False)
            self._tenants.close(account)
            raise
        self._num_added += 1

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended, in any state."""
        sequence.ended = True
        sequence.generation += 1
        if sequence.order < 0:  # it was never added
            return
        if sequence in self._running:
            del self._running[sequence]
            sequence.account.num_running -= 1
        else:
            self._waiting.forget(sequence)
            sequence.account.leave_round(sequence.group, sequence.round, has_started=False)
        self._tenants.close(sequence.account)

    def plan(self) -> Plan:
        """Plan the next step; a plan without rows if there is nothing to do."""
        while self._bisections:
            if sequences := [sequence for sequence in self._bisections.popleft() if not sequence.ended]:
                return _make_plan(sequences, [])
        if self._tenants.has_idle:
            self._tenants.forget_idle(self._waiting.floor())
        started = self._choose()
        return _make_plan(started, started)

    def _choose(self) -> list[Sequence]:
        chosen: list[Sequence] = []
        budget = self._max_batch_tokens
        for sequence, _ in self._waiting.passed():
            if len(chosen) < self._max_rows and self._fits(sequence, budget, chosen):
                self._start(sequence, chosen)
                budget -= len(sequence.tokens)
        while budget > 0 and len(chosen) < self._max_rows and (head := self._waiting.head()) is not None:
            if self._fits(head, budget, chosen):
                self._start(head, chosen)
                budget -= len(head.tokens)
            elif self._waiting.can_pass(head):
                self._waiting.pass_over(head, Passed(0, 0, 0))
            else:
                break
        return chosen

    def _fits(self, sequence: Sequence, budget: int, chosen: list[Sequence]) -> bool:
        return len(sequence.tokens) <= budget or not chosen

    def _start(self, sequence: Sequence, chosen: list[Sequence]) -> None:
        self._waiting.take(sequence)
        account = sequence.account
        account.num_running += 1
        account.leave_round(sequence.group, sequence.round, has_started=True)
        if self._tenants.are_several:
            self._tenants.charge(account, len(sequence.tokens) * PREFILL_COST)
        self._running[sequence] = None
        chosen.append(sequence)

    def bisect(self, chunks: list[tuple[Sequence, int]]) -> None:
        """Run each half of a failed step as a step of its own, before other work."""
        sequences = [sequence for sequence, _ in chunks]
        for sequence in sequences:
            sequence.rewind(0)
        middle = (len(sequences) + 1) // 2
        self._bisections.extendleft(half for half in (sequences[middle:], sequences[:middle]) if half)

    def rewind(self, sequence: Sequence, num_computed: int) -> None:
        """Not called: nothing is sampled, so no row waits for a mask."""
        raise RuntimeError(f"{len(sequence.tokens)} tokens computed whole go back to {num_computed}; this is a bug")

    def note_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Do nothing: a step leaves nothing behind."""

    def invalidate_tenant(self, sequence: Sequence) -> None:
        """Do nothing: a step leaves nothing behind."""

    def take_saves(self) -> tuple[tuple[int, int], ...]:
        return ()

    def note_step_ended(self) -> None:
        """Do nothing: a step leaves nothing behind."""

    def take_preempted(self) -> list[Sequence]:
        return []

    @property
    def has_work(self) -> bool:
        """False if no sequence waits: running sequences have nothing left to plan."""
        return bool(self._bisections or self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free_slots(self) -> int:
        return max(0, self._max_rows - len(self._running))

    @property
    def num_pages_held(self) -> int:
        return 0

    @property
    def num_pages_idle(self) -> int:
        return 0

    @property
    def checkpoint_bytes(self) -> int:
        return 0

    def num_waiting_of(self, tenant: bytes) -> int:
        return self._tenants.num_waiting_of(tenant)

    def share_of(self, tenant: bytes, weight: float) -> float:
        """See `ISequenceScheduler`."""
        return self._tenants.share_with(tenant, weight)

    def outlook(self) -> None:
        """Return None: it takes whole inputs, and no step's duration can be predicted."""

    def check_integrity(self) -> None:
        """Raises RuntimeError unless each sequence either waits or runs, and the accounts count them."""
        waiting = self._waiting.sequences()
        if any(sequence.ended or sequence in self._running for sequence in waiting):
            raise RuntimeError("a waiting sequence has ended, or runs")
        if any(sequence.ended for sequence in self._running):
            raise RuntimeError("a running sequence has ended")
        self._waiting.check_integrity()
        self._tenants.check_integrity([*self._running, *waiting])
        counts = Counter(sequence.account for sequence in self._running)
        if any(sequence.account.num_running != counts[sequence.account] for sequence in [*self._running, *waiting]):
            raise RuntimeError("the running sequences of a tenant are not counted")


def _make_plan(sequences: list[Sequence], started: list[Sequence]) -> Plan:
    lengths = [len(sequence.tokens) for sequence in sequences]
    for slot, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
        sequence.slot, sequence.num_computed = slot, length
    rows = list(range(len(sequences)))
    return Plan(
        sequences,
        [sequence.generation for sequence in sequences],
        list(rows),
        lengths,
        lengths,
        slot_init_sequences=started,
        pooled_rows=rows,
    )
