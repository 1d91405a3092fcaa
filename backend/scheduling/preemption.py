"""Preemption: which running sequences give up their slots and pages, and wait again."""

from __future__ import annotations

from collections import Counter

from penstock.backend.scheduling.running import RunningSequences
from penstock.backend.scheduling.tenants import Tenants
from penstock.backend.scheduling.wait_queue import WaitQueue
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.tenant_account import TenantAccount


class Preemption:
    """Moves sequences from the running ones back into the wait queue."""

    def __init__(self, running: RunningSequences, waiting: WaitQueue, tenants: Tenants) -> None:
        self._running = running
        self._waiting = waiting
        self._tenants = tenants
        self.count = 0
        self._preempted: list[Sequence] = []

    def take_preempted(self) -> list[Sequence]:
        """Sequences preempted since the last call, once per preemption."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def preempt(self, sequence: Sequence, *, requeue: bool = True) -> None:
        """Put a running sequence back into the wait queue. Its pages stay cached until others need them."""
        self._waiting.unpark(self._running.stop(sequence, is_preempted=True))
        sequence.restart()
        if requeue:
            self._waiting.put(sequence)
        self._preempted.append(sequence)
        self.count += 1

    def choose_victim(self) -> Sequence:
        """The last sequence of the tenant that holds the most pages for its weight.

        The first of all sequences keeps its pages as long as another runs, so one sequence always finishes.
        """
        if not self._tenants.are_several:
            return max(self._running.sequences, key=_turn)
        first = min(self._running.sequences, key=_turn)
        num_held = self._count_pages()
        others = [running for running in self._running.sequences if running is not first] or [first]
        most = max({running.account for running in others}, key=lambda account: num_held[account] / account.weight)
        return max((running for running in others if running.account is most), key=_turn)

    def choose_victims(
        self, account: TenantAccount, num_slots: int, num_pages: int, spared: set[Sequence]
    ) -> list[Sequence]:
        """Sequences to preempt so that num_slots and num_pages become free for the tenant; none if too many would be
        needed.

        They belong to tenants that have received at least as much service and keep their share of slots and pages.
        """
        num_held = self._count_pages()
        num_running = {owner: owner.num_running for owner in num_held}
        first = min(self._running.sequences, key=_turn)
        victims: list[Sequence] = []
        num_freed = 0
        for sequence in sorted(self._running.sequences, key=_turn, reverse=True):
            owner, num_its_pages = sequence.account, len(sequence.kv.held_pages)
            if owner is account or owner.service < account.service or sequence is first or sequence in spared:
                continue
            share = self._tenants.share_of(owner)
            if num_slots and num_running[owner] - 1 < share * self._running.max_running:
                continue
            if num_pages and num_held[owner] - num_its_pages < share * self._running.num_pages:
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
        for sequence in self._running.sequences:
            num_held[sequence.account] += len(sequence.kv.held_pages)
        return num_held


def _turn(sequence: Sequence) -> tuple[float, int, int, int]:
    return sequence.turn
