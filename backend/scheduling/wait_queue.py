"""Sequences that wait to be admitted: in their tenant's queue, set aside because they do not fit, or parked until
another sequence has computed their prefix."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.backend.kv_cache.prefix_cache import Awaited
    from penstock.backend.scheduling.tenants import Tenants
    from penstock.backend.sequences.sequence import Sequence
    from penstock.backend.sequences.tenant_account import TenantAccount

    Entry: TypeAlias = tuple[tuple[float, int, int, int], Sequence]
    """A sequence, after its turn."""

_MAX_PASSED = 32
_MAX_PASSED_OF_TENANT = 8


@dataclass(slots=True)
class Passed:
    """When to look again at a sequence that did not fit, while later ones that fit pass it."""

    num_pages: int
    """Pages that it needed when it was first passed."""
    num_available: int
    """It is looked at again when this many pages are available, or at `again_step`."""
    again_step: int


class WaitQueue:
    """Each waiting sequence is here once: in its tenant's queue, among the passed ones, or parked under one key.

    The cost of a call grows with the logarithm of the number of waiting sequences and tenants.

    The head is the first of the sequences that an earlier backend had started (`Sequence.goes_first`). If there are
    none, it is the first sequence of the tenant that has received the least service.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._queues: dict[TenantAccount, list[Entry]] = {}
        """Each tenant's sequences by `Sequence.turn`, but for those that go first."""
        self._first: list[Entry] = []
        """Sequences of all tenants that go first, by `Sequence.turn`."""
        self._turns: list[tuple[float, int, TenantAccount]] = []
        """(service, tie-breaker, tenant) of each tenant in _queues, least service first. A tenant's service may have
        grown since."""
        self._num_turns = 0
        self._num_queued = 0
        """Entries of all queues."""
        self._num_stale = 0
        """Ended sequences that are still in a queue."""
        self._passed: dict[Sequence, Passed] = {}
        self._parked: dict[Awaited, dict[Sequence, None]] = {}
        self._key_of: dict[Sequence, Awaited] = {}
        self._deadlines: deque[tuple[int, Sequence]] = deque()
        """(deadline step, sequence), oldest first; entries may be stale."""

    def __len__(self) -> int:
        return self._num_queued - self._num_stale + len(self._passed) + len(self._key_of)

    @property
    def num_parked(self) -> int:
        return len(self._key_of)

    @property
    def num_tenants(self) -> int:
        """Tenants with a queue, even if all its entries have ended."""
        return len(self._queues)

    def put(self, sequence: Sequence) -> None:
        """Add to its tenant's queue by `Sequence.turn`, which a preempted sequence keeps.

        A tenant that begins to wait gets at least the service of the `floor`: it gains no advantage from being idle.
        """
        account = sequence.account
        queue = self._queues.get(account)
        if queue is not None:
            self._drop_ended(queue)
        if not queue and not account.num_passed:
            account.service = max(account.service, self.floor())
        if sequence.goes_first:
            heapq.heappush(self._first, (sequence.turn, sequence))
            self._num_queued += 1
            return
        if (queue := self._queues.get(account)) is None:  # `floor` drops empty ones
            self._add_turn(account)
            queue = self._queues[account] = []
        heapq.heappush(queue, (sequence.turn, sequence))
        self._num_queued += 1

    def _add_turn(self, account: TenantAccount) -> None:
        """Among tenants with equal service the one that came first goes first, with one exception: a tenant that has
        nothing running goes before a head that has. The exception cannot repeat for ever: each step charges such a
        head, so their service does not stay equal."""
        head = self._head_of_tenants()
        goes_first = head is not None and head.account.num_running > 0 and not account.num_running
        self._num_turns += 1
        number = -self._num_turns if goes_first else self._num_turns
        heapq.heappush(self._turns, (account.service, number, account))

    def _drop_ended(self, queue: list[Entry]) -> None:
        while queue and queue[0][1].ended:
            heapq.heappop(queue)
            self._num_queued -= 1
            self._num_stale -= 1

    def head(self) -> Sequence | None:
        """The next sequence in the queues: not passed, not parked."""
        if self._first:
            self._drop_ended(self._first)
        return self._first[0][1] if self._first else self._head_of_tenants()

    def _head_of_tenants(self) -> Sequence | None:
        while self._turns:
            service, _, account = self._turns[0]
            queue = self._queues[account]
            self._drop_ended(queue)
            if not queue:
                heapq.heappop(self._turns)
                del self._queues[account]
            elif service < account.service:
                self._num_turns += 1
                heapq.heapreplace(self._turns, (account.service, self._num_turns, account))
            else:
                return queue[0][1]
        return None

    def floor(self) -> float:
        """The least service of a tenant that waits or, if none does, the highest service of all."""
        least = [passed.account.service for passed in self._passed]
        least += [entry[1].account.service for entry in self._first if not entry[1].ended]
        if (head := self._head_of_tenants()) is not None:
            least.append(head.account.service)
        return min(least, default=self._tenants.highest_service)

    def take(self, sequence: Sequence) -> None:
        """Remove a sequence that `head` or `passed` has returned."""
        if sequence in self._passed:
            self._unpass(sequence)
        else:
            heapq.heappop(self._first if sequence.goes_first else self._queues[sequence.account])
            self._num_queued -= 1

    # Passing

    def passed(self) -> Iterator[tuple[Sequence, Passed]]:
        """Sequences that others may pass, in the order in which they were set aside. `take` may be called during the
        iteration."""
        return iter(list(self._passed.items()))

    def is_next(self, sequence: Sequence) -> bool:
        """Whether it may be taken: it is the head or has been passed."""
        return sequence in self._passed or self.head() is sequence

    def passed_before(self, sequence: Sequence) -> Iterator[Sequence]:
        """The passed sequences that a sequence would pass if it were taken."""
        return itertools.takewhile(lambda other: other is not sequence, self._passed)

    def can_pass(self, sequence: Sequence) -> bool:
        """Whether one more sequence may be passed. If not, this head keeps all others waiting."""
        return len(self._passed) < _MAX_PASSED and sequence.account.num_passed < _MAX_PASSED_OF_TENANT

    def pass_over(self, sequence: Sequence, passed: Passed) -> None:
        """Set aside the sequence that `head` has returned, so that others can pass it."""
        self.take(sequence)
        self._passed[sequence] = passed
        sequence.account.num_passed += 1

    def _unpass(self, sequence: Sequence) -> None:
        del self._passed[sequence]
        sequence.account.num_passed -= 1

    # Parking

    def park(self, sequence: Sequence, key: Awaited, deadline_step: int) -> None:
        """Keep a sequence that was taken out until `unpark` is called with the key, or `unpark_overdue` with the
        deadline.

        The deadline never decreases from call to call.
        """
        self._deadlines.append((deadline_step, sequence))
        self._parked.setdefault(key, {})[sequence] = None
        self._key_of[sequence] = key

    def unpark(self, keys: Iterable[Awaited]) -> None:
        for key in keys:
            for sequence in self._parked.pop(key, ()):
                del self._key_of[sequence]
                self.put(sequence)

    def unpark_overdue(self, step: int) -> None:
        while self._deadlines and self._deadlines[0][0] <= step:
            _, sequence = self._deadlines.popleft()
            if (key := self._key_of.pop(sequence, None)) is not None:
                self._remove_parked(key, sequence)
                self.put(sequence)

    def _remove_parked(self, key: Awaited, sequence: Sequence) -> None:
        del self._parked[key][sequence]
        if not self._parked[key]:
            del self._parked[key]

    def forget(self, sequence: Sequence) -> None:
        """Note that a waiting sequence has ended. Its entry is dropped at its turn, or when most entries are stale."""
        if (key := self._key_of.pop(sequence, None)) is not None:
            self._remove_parked(key, sequence)
        elif sequence in self._passed:
            self._unpass(sequence)
        else:
            self._num_stale += 1
            if self._num_stale > 64 and self._num_stale * 2 > self._num_queued:
                self._drop_all_ended()

    def _drop_all_ended(self) -> None:
        """Drop ended sequences, and tenants without other entries: their turns may not come while one with less service
        waits."""
        self._num_queued = self._num_stale = 0
        for queue in (*self._queues.values(), self._first):
            queue[:] = [entry for entry in queue if not entry[1].ended]
            heapq.heapify(queue)
            self._num_queued += len(queue)
        self._queues = {account: queue for account, queue in self._queues.items() if queue}
        self._turns = [turn for turn in self._turns if turn[2] in self._queues]
        heapq.heapify(self._turns)

    # Checks

    def sequences(self) -> list[Sequence]:
        """All waiting sequences, in no particular order."""
        queues = (*self._queues.values(), self._first)
        queued = [entry[1] for queue in queues for entry in queue if not entry[1].ended]
        return [*queued, *self._passed, *self._key_of]

    def parked(self) -> list[Sequence]:
        return list(self._key_of)

    def parked_keys(self) -> set[Awaited]:
        return set(self._parked)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless each tenant with a queue has one turn, and the passed sequences are counted."""
        if sorted(map(id, self._queues)) != sorted(id(account) for _, _, account in self._turns):
            raise RuntimeError("a tenant's queue has no turn, or several")
        if any(service > account.service for service, _, account in self._turns):
            raise RuntimeError("a tenant's service has decreased while it waits")
        for account in {passed.account for passed in self._passed} | self._queues.keys():
            if account.num_passed != sum(passed.account is account for passed in self._passed):
                raise RuntimeError(f"{account.num_passed} passed sequences of a tenant are counted")
