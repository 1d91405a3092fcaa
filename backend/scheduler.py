"""Which sequences run in the next step, and how many tokens of each. Knows pages and slots; knows no model, no link.

There is no prefill phase and no decode phase: running sequences first, those that need one token before those that
need many, then as many waiting ones as slots, pages and the token budget allow.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from backend.page_keys import extend_page_keys
from backend.waiting_room import WaitingRoom

if TYPE_CHECKING:
    from backend.page_pool import PagePool
    from backend.sequence import Sequence


@dataclass(slots=True)
class Row:
    """A sequence's part in one step: num_tokens from position start on."""

    sequence: Sequence
    generation: int
    start: int
    num_tokens: int
    samples: bool
    """The row reaches the sequence's last token, so the step samples the next one."""
    takes_slot: bool
    """The first row since the sequence was given its slot, or since the slot's state ran ahead of it."""
    stops: bool = False
    """Set by the executor: the token sampled for it ends the sequence, as far as its listeners then wished."""

    @property
    def is_stale(self) -> bool:
        """The sequence ended, was restarted or sampled its last token after this row was planned."""
        sequence = self.sequence
        return (
            sequence.ended or sequence.generation != self.generation or sequence.stopped_generation == self.generation
        )


class Scheduler:
    """Sequences waiting and running. A sequence is in exactly one place: waiting, running, or not here.

    Pages and slots may be reused at once, though steps that wrote to them are still in flight: steps run in the order
    in which they are planned, so what a new owner writes comes after. A page is named, and so shared, only when the
    step that completed it has been applied.
    """

    def __init__(self, pool: PagePool, page_size_tokens: int, max_running: int, max_batch_tokens: int) -> None:
        self._pool = pool
        self._page_size = page_size_tokens
        self._max_batch_tokens = max_batch_tokens
        self._free_slots = list(range(max_running - 1, -1, -1))
        self.max_running = max_running
        self._waiting = WaitingRoom()
        self._running: dict[Sequence, None] = {}  # in order of admission
        self._computing: dict[bytes, Sequence] = {}
        """Key of a page that a running sequence is about to complete → that sequence."""
        self._num_added = 0
        self.num_preemptions = 0

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

    def add(self, sequence: Sequence) -> None:
        """To its place in the queue. The caller has checked that the sequence can fit the pool by itself."""
        sequence.order = self._num_added
        self._num_added += 1
        self._waiting.put(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence ended, for whatever reason and in whatever state; its pages and slot are free at once."""
        sequence.ended = True
        if sequence in self._running:
            self._stop_running(sequence)
        else:
            self._waiting.forget(sequence)

    def plan(self) -> list[Row]:
        """The rows of the next step, those of one token first; empty when there is nothing to do."""
        single, several = [], []
        for sequence in self._running:
            if (num_tokens := sequence.num_to_compute) == 1:
                single.append((sequence, 1))
            elif num_tokens > 1:
                several.append((sequence, num_tokens))
        rows: list[Row] = []
        budget = self._max_batch_tokens
        num_preemptions = self.num_preemptions
        for sequence, num_wanted in single + several:
            if budget == 0:
                break
            if sequence.slot is None:  # preempted for one before it
                continue
            num_tokens = num_wanted if num_wanted < budget else budget
            end = sequence.num_computed + num_tokens
            if end <= len(sequence.pages) * self._page_size or self._find_pages(sequence, end):
                rows.append(self._advance(sequence, num_tokens))
                budget -= num_tokens
        if self.num_preemptions != num_preemptions:
            rows = [row for row in rows if not row.is_stale]
        else:
            self._admit(rows, budget)
        if several or len(rows) > len(single):
            rows.sort(key=lambda row: row.num_tokens > 1)
        return rows

    def note_computed(self, row: Row) -> None:
        """The row's step has been applied: pages that it completed can be shared, and who waited for them may go on."""
        sequence = row.sequence
        num_full = (row.start + row.num_tokens) // self._page_size
        if num_full <= sequence.num_named_pages:
            return
        extend_page_keys(
            sequence.page_keys, sequence.tokens, num_full * self._page_size, self._page_size, sequence.salt
        )
        keys = sequence.page_keys[sequence.num_named_pages : num_full]
        for page, key in zip(sequence.pages[sequence.num_named_pages : num_full], keys, strict=True):
            self._pool.name(page, key)
        sequence.num_named_pages = num_full
        self._end_computing(sequence, keys)

    def distrust(self, sequence: Sequence) -> None:
        """A running sequence's logits were bad, and so may be what its pages hold: nobody is to find them."""
        self._pool.disown(sequence.pages)

    def _admit(self, rows: list[Row], budget: int) -> None:
        """Starts waiting sequences in order while budget, slots and pages last.

        A slot is kept for each one that is parked: it came first, and a thousand of one prefix are not looked at in one
        plan.
        """
        while (
            len(self._free_slots) > self._waiting.num_parked
            and budget > 0
            and (sequence := self._waiting.head()) is not None
        ):
            found, key = self._find_prefix(sequence)
            if key is not None:
                self._waiting.park_head(key)
                continue
            # All its known tokens and the next must fit now, so that it is not preempted before it makes progress.
            num_new = self._pages_for(min(len(sequence.tokens) + 1, sequence.max_total_tokens)) - len(found)
            if num_new + sum(self._pool.is_idle(page) for page in found) > self._pool.num_available:
                return
            self._waiting.take_head()
            self._start(sequence, found, num_new)
            num_tokens = min(sequence.num_to_compute, budget)
            rows.append(self._advance(sequence, num_tokens))
            budget -= num_tokens

    def _find_prefix(self, sequence: Sequence) -> tuple[list[int], bytes | None]:
        """Pages that hold the beginning of the sequence; and the key of the last one that another is computing now.

        One token at least is left to compute: the logits of the last one are needed.
        """
        num_tokens = len(sequence.tokens) - 1
        extend_page_keys(sequence.page_keys, sequence.tokens, num_tokens, self._page_size, sequence.salt)
        keys = sequence.page_keys[: num_tokens // self._page_size]
        found: list[int] = []
        for key in keys:
            if (page := self._pool.find(key)) is None:
                break
            found.append(page)
        awaited = None
        for key in keys[len(found) :]:
            if key not in self._computing:
                break
            awaited = key
        return found, awaited

    def _start(self, sequence: Sequence, found: list[int], num_new_pages: int) -> None:
        self._running[sequence] = None
        sequence.slot = self._free_slots.pop()
        for page in found:
            self._pool.hold(page)
        sequence.pages = found + self._pool.take(num_new_pages)
        sequence.num_named_pages = len(found)
        sequence.num_computed = sequence.num_cached = len(found) * self._page_size
        for key in sequence.page_keys[len(found) :]:
            self._computing.setdefault(key, sequence)

    def _end_computing(self, sequence: Sequence, keys: list[bytes]) -> None:
        ended = [key for key in keys if self._computing.get(key) is sequence]
        for key in ended:
            del self._computing[key]
        self._waiting.unpark(ended)

    def _advance(self, sequence: Sequence, num_tokens: int) -> Row:
        start = sequence.num_computed
        sequence.num_computed += num_tokens
        takes_slot, sequence.needs_slot_init = sequence.needs_slot_init, False
        samples = sequence.num_computed == len(sequence.tokens) + sequence.num_pending
        if samples:
            sequence.num_pending += 1
        return Row(sequence, sequence.generation, start, num_tokens, samples, takes_slot)

    def _find_pages(self, sequence: Sequence, num_tokens: int) -> bool:
        """Pages for num_tokens of a running sequence, at the cost of lower ranks. False: it was preempted itself."""
        missing = self._pages_for(num_tokens) - len(sequence.pages)
        while missing > self._pool.num_available:
            last = max(self._running, key=lambda running: (running.rank, running.order))
            self._preempt(last)
            if last is sequence:
                return False
        if missing > 0:
            sequence.pages += self._pool.take(missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to its place in the queue; its tokens are kept, and its pages too until others need them."""
        self._stop_running(sequence)
        sequence.restart()
        self._waiting.put(sequence)
        self.num_preemptions += 1

    def _stop_running(self, sequence: Sequence) -> None:
        del self._running[sequence]
        self._end_computing(sequence, sequence.page_keys[sequence.num_named_pages :])
        self._pool.give_back(sequence.pages)
        sequence.pages = []
        if sequence.slot is not None:
            self._free_slots.append(sequence.slot)
            sequence.slot = None

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless pages and slots are conserved and nobody waits for what nobody computes."""
        self._pool.check_integrity()
        holders = Counter(page for sequence in self._running for page in sequence.pages)
        if len(holders) != self._pool.num_held:
            raise RuntimeError(f"{self._pool.num_held} pages are held, running sequences have {len(holders)}")
        if any(self._pool.num_holders(page) != count for page, count in holders.items()):
            raise RuntimeError("a page's holders are not the sequences that have it")
        slots = {sequence.slot for sequence in self._running}
        if None in slots or len(slots) != len(self._running) or len(slots) + len(self._free_slots) != self.max_running:
            raise RuntimeError(f"{len(slots)} slots are taken and {len(self._free_slots)} free of {self.max_running}")
        for sequence in self._running:
            if sequence.ended or self._pages_for(sequence.num_computed) > len(sequence.pages):
                raise RuntimeError("a running sequence has ended or computed more than its pages hold")
        for sequence in self._waiting.sequences():
            if sequence.pages or sequence.slot is not None or sequence.ended or sequence in self._running:
                raise RuntimeError("a waiting sequence holds pages or a slot, or has ended, or runs")
        if not self._waiting.parked_keys() <= self._computing.keys():
            raise RuntimeError("a sequence waits for a page that nobody computes")
        if any(sequence not in self._running for sequence in self._computing.values()):
            raise RuntimeError("a page is computed by a sequence that does not run")
