"""Which sequences run in the next step, and how many tokens of each. Knows pages and slots; knows no model, no link.

There is no prefill phase and no decode phase: running sequences first, those that need one token before those that
need many, then as many waiting ones as slots, pages and the token budget allow.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backend.page_pool import PagePool
    from backend.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence's part in one step: num_tokens from position start on."""

    sequence: Sequence
    generation: int
    start: int
    num_tokens: int
    samples: bool
    """The row reaches the sequence's last token, so the step samples the next one."""
    takes_slot: bool
    """The first row since the sequence was given its slot."""

    @property
    def is_stale(self) -> bool:
        """The sequence ended, was preempted or sampled a stop token after this row was planned."""
        sequence = self.sequence
        return (
            sequence.ended or sequence.generation != self.generation or sequence.stopped_generation == self.generation
        )


class Scheduler:
    """Sequences waiting and running. A sequence is in exactly one place: waiting, running, or not here.

    Pages and slots may be reused at once, though steps that wrote to them are still in flight: steps run in the order
    in which they are planned, so what a new owner writes comes after.
    """

    def __init__(self, pool: PagePool, page_size_tokens: int, max_running: int, max_batch_tokens: int) -> None:
        self._pool = pool
        self._page_size = page_size_tokens
        self._max_batch_tokens = max_batch_tokens
        self._free_slots = list(range(max_running - 1, -1, -1))
        self._max_running = max_running
        self._waiting: deque[Sequence] = deque()
        self._running: dict[Sequence, None] = {}  # in order of admission
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_pages_held(self) -> int:
        return self._pool.num_held

    def add(self, sequence: Sequence) -> None:
        """To the end of the queue. The caller has checked that the sequence can fit the pool by itself."""
        self._waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence ended, for whatever reason and in whatever state; its pages and slot are free at once."""
        sequence.ended = True
        if sequence in self._running:
            self._stop_running(sequence)
        else:
            self._waiting.remove(sequence)

    def plan(self) -> list[Row]:
        """The rows of the next step, those of one token first; empty when there is nothing to do."""
        rows: list[Row] = []
        budget = self._max_batch_tokens
        num_preemptions = self.num_preemptions
        by_need = [s for s in self._running if s.num_to_compute == 1] + [
            s for s in self._running if s.num_to_compute > 1
        ]
        for sequence in by_need:
            if budget == 0:
                break
            if sequence not in self._running:  # preempted for one before it
                continue
            num_tokens = min(sequence.num_to_compute, budget)
            if self._find_pages(sequence, sequence.num_computed + num_tokens):
                rows.append(self._advance(sequence, num_tokens))
                budget -= num_tokens
        if self.num_preemptions != num_preemptions:
            rows = [row for row in rows if not row.is_stale]
        else:
            budget = self._admit(rows, budget)
        rows.sort(key=lambda row: row.num_tokens > 1)
        return rows

    def _admit(self, rows: list[Row], budget: int) -> int:
        """Starts waiting sequences in order while budget, slots and pages last. Returns the budget left."""
        while self._waiting and self._free_slots and budget > 0:
            sequence = self._waiting[0]
            # All its known tokens and the next must fit now, so that it is not preempted before it makes progress.
            num_pages = self._pages_for(min(len(sequence.tokens) + 1, sequence.max_total_tokens))
            if num_pages > self._pool.num_free:
                break
            self._waiting.popleft()
            self._running[sequence] = None
            sequence.slot = self._free_slots.pop()
            sequence.pages = self._pool.take(num_pages)
            num_tokens = min(sequence.num_to_compute, budget)
            rows.append(self._advance(sequence, num_tokens, takes_slot=True))
            budget -= num_tokens
        return budget

    def _advance(self, sequence: Sequence, num_tokens: int, *, takes_slot: bool = False) -> Row:
        start = sequence.num_computed
        sequence.num_computed += num_tokens
        samples = sequence.num_computed == sequence.num_planned
        if samples:
            sequence.num_pending += 1
        return Row(sequence, sequence.generation, start, num_tokens, samples, takes_slot)

    def _find_pages(self, sequence: Sequence, num_tokens: int) -> bool:
        """Pages for num_tokens of a running sequence, at the cost of newer ones. False: it was preempted itself."""
        missing = self._pages_for(num_tokens) - len(sequence.pages)
        while missing > self._pool.num_free:
            newest = next(reversed(self._running))
            self._preempt(newest)
            if newest is sequence:
                return False
        if missing > 0:
            sequence.pages += self._pool.take(missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; its tokens are kept and computed again when there is room for all of them."""
        self._stop_running(sequence)
        sequence.restart()
        self._waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _stop_running(self, sequence: Sequence) -> None:
        del self._running[sequence]
        self._pool.give_back(sequence.pages)
        sequence.pages = []
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)
            sequence.slot = None

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless pages and slots are conserved and each is held by one running sequence."""
        self._pool.check_integrity()
        pages = [page for sequence in self._running for page in sequence.pages]
        if len(pages) != self._pool.num_held or len(set(pages)) != len(pages):
            raise RuntimeError(f"{self._pool.num_held} pages are held, running sequences have {len(pages)}")
        slots = [sequence.slot for sequence in self._running]
        if len(set(slots)) != len(slots) or len(slots) + len(self._free_slots) != self._max_running:
            raise RuntimeError(f"{len(slots)} slots are taken and {len(self._free_slots)} free of {self._max_running}")
        for sequence in self._running:
            if sequence.ended or self._pages_for(sequence.num_computed) > len(sequence.pages):
                raise RuntimeError("a running sequence has ended or computed more than its pages hold")
        if any(sequence.pages or sequence.slot is not None or sequence.ended for sequence in self._waiting):
            raise RuntimeError("a waiting sequence holds pages or a slot, or has ended")
