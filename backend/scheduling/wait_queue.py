"""Sequences that wait to be admitted: in their tenant's queue, set aside because they do not fit, parked until another
sequence has computed their prefix, or kept until a picture is encoded."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.backend.kv_cache.prefix_cache import Awaited
from penstock.backend.scheduling.tenant_line import TenantLine, Turn, WaitingTenants, expected_cost
from penstock.backend.scheduling.tenants import Tenants
from penstock.backend.sequences.pictures import PictureKey
from penstock.backend.sequences.sequence import Sequence
from penstock.backend.sequences.tenant_account import TenantAccount

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
    """Each waiting sequence is here once: in its tenant's line, among the passed ones, parked under one key, or
    it awaits a picture.

    The cost of a call grows with the logarithm of the number of waiting sequences and tenants.

    The head is the first of the sequences that an earlier backend had started (`Sequence.goes_first`). If there are
    none, it is the first sequence of the tenant that has received the least service.
    """

    def __init__(self, tenants: Tenants) -> None:
        self._tenants = tenants
        self._lines: dict[TenantAccount, TenantLine] = {}
        """Each tenant's sequences, but for those that go first. No line is empty."""
        self._first = TenantLine()
        """Sequences of all tenants that go first."""
        self._turns: list[tuple[float, int, TenantAccount]] = []
        """(service, line's number, tenant) of each line, least service first. A tenant's service may have grown since.
        Entries whose line has gone are stale."""
        self._num_turns = 0
        self._num_queued = 0
        """Sequences in all lines."""
        self._passed: dict[Sequence, Passed] = {}
        self._parked: dict[Awaited, dict[Sequence, None]] = {}
        self._key_of: dict[Sequence, Awaited] = {}
        self.awaiting: dict[Sequence, PictureKey] = {}
        """Sequences whose next token is one of a picture that is not encoded; kept by `AwaitedPictures`."""
        self._deadlines: deque[tuple[int, Sequence]] = deque()
        """(deadline step, sequence), oldest first; entries may be stale."""

    def __len__(self) -> int:
        return self._num_queued + len(self._passed) + len(self._key_of) + len(self.awaiting)

    @property
    def num_parked(self) -> int:
        return len(self._key_of)

    @property
    def num_turns(self) -> int:
        """Remembered turns of tenants, stale ones too."""
        return len(self._turns)

    def put(self, sequence: Sequence) -> None:
        """Add to its tenant's line by `Sequence.turn`, which a preempted sequence keeps.

        A tenant that begins to wait gets at least the service of the `floor`: it gains no advantage from being idle.
        """
        account = sequence.account
        if account not in self._lines and not account.num_passed:
            account.service = max(account.service, self.floor())
        if sequence.goes_first:
            line = self._first
        elif (found := self._lines.get(account)) is not None:
            line = found
        else:
            line = self._add_line(account)
        line.add(sequence)
        self._num_queued += 1

    def _add_line(self, account: TenantAccount) -> TenantLine:
        """Among tenants with equal service the one that came first goes first, with one exception: a tenant that has
        nothing running goes before a head that has. The exception cannot repeat for ever: each step charges such a
        head, so their service does not stay equal."""
        head = self._head_of_tenants()
        goes_first = head is not None and head.account.num_running > 0 and not account.num_running
        if len(self._turns) > 64 + 2 * len(self._lines):
            self._turns = [turn for turn in self._turns if self._is_current(turn)]
            heapq.heapify(self._turns)
        line = self._lines[account] = TenantLine()
        self._num_turns += 1
        line.number = -self._num_turns if goes_first else self._num_turns
        heapq.heappush(self._turns, (account.service, line.number, account))
        return line

    def _is_current(self, turn: tuple[float, int, TenantAccount]) -> bool:
        line = self._lines.get(turn[2])
        return line is not None and line.number == turn[1]

    def _remove(self, sequence: Sequence) -> None:
        """Remove from its line."""
        account = sequence.account
        self._num_queued -= 1
        if sequence.goes_first:
            self._first.remove(sequence)
            return
        line = self._lines[account]
        line.remove(sequence)
        if not line:
            del self._lines[account]

    def head(self) -> Sequence | None:
        """The next sequence in the lines: not passed, not parked."""
        return self._first.head if self._first else self._head_of_tenants()

    def _head_of_tenants(self) -> Sequence | None:
        while self._turns:
            service, _, account = self._turns[0]
            if not self._is_current(self._turns[0]):
                heapq.heappop(self._turns)
            elif service < account.service:
                line = self._lines[account]
                self._num_turns += 1
                line.number = self._num_turns
                heapq.heapreplace(self._turns, (account.service, line.number, account))
            else:
                return self._lines[account].head
        return None

    def floor(self) -> float:
        """The least service of a tenant that waits or, if none does, the highest service of all."""
        least = [passed.account.service for passed in self._passed]
        least += [sequence.account.service for sequence in self._first]
        if (head := self._head_of_tenants()) is not None:
            least.append(head.account.service)
        return min(least, default=self._tenants.highest_service)

    def take(self, sequence: Sequence) -> None:
        """Remove a sequence that `head` or `passed` has returned."""
        if sequence in self._passed:
            self._unpass(sequence)
        else:
            self._remove(sequence)

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
        """Remove a waiting sequence that has ended."""
        if (key := self._key_of.pop(sequence, None)) is not None:
            self._remove_parked(key, sequence)
        elif sequence in self._passed:
            self._unpass(sequence)
        elif self.awaiting.pop(sequence, None) is None:
            self._remove(sequence)

    # Quotes

    def next_sequences(self, count: int) -> list[Sequence]:
        """The first waiting sequences, in the order in which they are expected to start.

        Each is charged when it starts, for its `expected_cost`. Parked and passed ones came before; preemption for a
        tenant under its share is not predicted.
        """
        ahead = itertools.chain(self._first, self._passed, self._key_of, self.awaiting)
        found = list(itertools.islice(ahead, count))
        turns = [(account.service, line.number, account) for account, line in self._lines.items()]
        heapq.heapify(turns)
        lines = {account: iter(self._lines[account]) for _, _, account in turns}
        while turns and len(found) < count:
            service, number, account = turns[0]
            if (sequence := next(lines[account], None)) is None:
                heapq.heappop(turns)
            else:
                found.append(sequence)
                heapq.heapreplace(turns, (service + expected_cost(sequence) / account.weight, number, account))
        return found

    def tenants(self) -> WaitingTenants:
        return WaitingTenants(self._lines)

    def num_before(self, sequence: Sequence, turn: Turn, account: TenantAccount, tenants: WaitingTenants) -> int:
        """The number of sequences that are expected to start before one that waits, or would wait, with this turn."""
        ahead = [*self._first, *self._passed, *self._key_of, *self.awaiting]
        if sequence in ahead:
            return ahead.index(sequence)
        line, num_own, service = self._lines.get(account), 0, account.service
        if line is None:
            service = max(service, self.floor())
        else:
            num_own = line.num_before(turn)
            service += num_own * line.cost / len(line) / account.weight
        return len(ahead) + num_own + tenants.num_before(service, account)

    # Checks

    def sequences(self) -> list[Sequence]:
        """All waiting sequences, in no particular order."""
        queued = itertools.chain(self._first, *self._lines.values())
        return [*queued, *self._passed, *self._key_of, *self.awaiting]

    def parked(self) -> list[Sequence]:
        return list(self._key_of)

    def parked_keys(self) -> set[Awaited]:
        return set(self._parked)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless each tenant with a line has one turn, and the passed sequences are counted."""
        current = [turn[2] for turn in self._turns if self._is_current(turn)]
        if len(current) != len(self._lines) or set(current) != self._lines.keys() or not all(self._lines.values()):
            raise RuntimeError("a tenant's line has no turn, or several, or is empty")
        if any(turn[0] > turn[2].service for turn in self._turns if self._is_current(turn)):
            raise RuntimeError("a tenant's service has decreased while it waits")
        if self._num_queued != len(self._first) + sum(map(len, self._lines.values())):
            raise RuntimeError(f"{self._num_queued} sequences in lines are counted")
        for account in {passed.account for passed in self._passed} | self._lines.keys():
            if account.num_passed != sum(passed.account is account for passed in self._passed):
                raise RuntimeError(f"{account.num_passed} passed sequences of a tenant are counted")
