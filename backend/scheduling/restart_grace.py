"""Delays sequences after a restart, while the requests of the earlier backend come back one by one."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.backend.sequences.sequence import NEW, Sequence

_LATER_LIMIT = 10
_START_S = 0.5
"""Frontends look for the new backend every 0.05 s. All of them should be connected before a coalesced group
continues."""
_QUIET_S = 0.1
_LIMIT_S = 2.0
_LATER_QUIET_S = 0.005


class RestartGrace:
    """Sequences go to the scheduler in their old order, once no more are expected.

    By then a coalesced group should be complete, and begin with the tokens that all its members have received. It opens
    with the first sequence that was admitted before. Near the backend's start it delays new sequences too, so that they
    do not overtake; later new sequences pass it.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        start_s: float = 0.0,
        quiet_s: float = 0.0,
        longest_s: float = 0.0,
        later_quiet_s: float | None = None,
    ) -> None:
        """The backend starts now.

        It ends quiet_s after the last resumed sequence, but not before start_s after the start, and at the latest
        longest_s after it opened. The defaults delay a sequence until the next plan.

        If it opens later than start_s after the start, later_quiet_s replaces quiet_s: then the sequences come from a
        replica, and their frontends, which are all connected, send them at the same moment. Sequences of a leaving
        replica come one by one, so then it lasts at most ten times later_quiet_s.
        """
        self._clock = clock
        self._started_s = clock()
        self._start_s = start_s
        self._quiet_s = quiet_s
        self._longest_s = longest_s
        self._later_quiet_s = quiet_s if later_quiet_s is None else later_quiet_s
        self._delayed: dict[Sequence, None] = {}
        self._opened_s = 0.0
        self._last_resumed_s = 0.0

    def __len__(self) -> int:
        return len(self._delayed)

    def delay(self, sequence: Sequence) -> bool:
        """Whether the sequence is delayed. Otherwise it goes to the scheduler at once."""
        now_s = self._clock()
        if sequence.admitted_ns != NEW:
            self._opened_s = self._opened_s if self._delayed else now_s
            self._last_resumed_s = now_s
        elif not self._delayed or self._is_late:
            return False
        self._delayed[sequence] = None
        return True

    def note_resumed(self) -> None:
        """Note that a resumed request has joined a delayed sequence: more may come."""
        self._last_resumed_s = self._clock()

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended. It need not be delayed."""
        self._delayed.pop(sequence, None)

    def num_delayed_of(self, tenant: bytes) -> int:
        return sum(sequence.tenant == tenant for sequence in self._delayed)

    def next_due_s(self, at_most_s: float) -> float:
        """Seconds until it ends, or at_most_s if that is sooner."""
        if not self._delayed:
            return at_most_s
        quiet_s = self._later_quiet_s if self._is_late else self._quiet_s
        longest_s = min(self._longest_s, _LATER_LIMIT * quiet_s) if self._is_late else self._longest_s
        due_s = max(self._last_resumed_s + quiet_s, self._started_s + self._start_s)
        return min(at_most_s, max(0.0, min(due_s, self._opened_s + longest_s) - self._clock()))

    @property
    def _is_late(self) -> bool:
        return self._opened_s > self._started_s + self._start_s

    def take_due(self) -> list[Sequence]:
        """When it has ended, remove and return all sequences in the order in which they run; until then
        return none."""
        if not self._delayed or self.next_due_s(1.0) > 0.0:
            return []
        due = sorted(self._delayed, key=lambda sequence: (sequence.rank, sequence.admitted_ns))
        self._delayed.clear()
        return due


def grace_at_start(*, beside_another: bool) -> RestartGrace:
    """Beside another backend nobody waits for this one: streams come one by one, when that one hands them over."""
    start_s = 0.0 if beside_another else _START_S
    return RestartGrace(
        time.monotonic, start_s=start_s, quiet_s=_QUIET_S, longest_s=_LIMIT_S, later_quiet_s=_LATER_QUIET_S
    )
