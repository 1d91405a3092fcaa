"""The account of one tenant: the service that it has received, and its open sequences."""

from __future__ import annotations

from typing import TypeAlias

Group: TypeAlias = tuple[int, int]
"""(frontend, number): the sequences of one request that has several."""


class TenantAccount:
    """One tenant's share of the device. Owned by the scheduler, which forgets it when it is idle."""

    __slots__ = ("_rounds", "key", "num_open", "num_passed", "num_running", "round", "service", "weight")

    def __init__(self, key: bytes, weight: float) -> None:
        self.key = key
        self.weight = weight
        """Service that it is due in proportion to the other tenants'."""
        self.service = 0.0
        """Cost of the tokens computed for it, divided by its weight: the virtual token counter. It never decreases."""
        self.num_open = 0
        """Sequences that have not ended."""
        self.num_running = 0
        self.num_passed = 0
        """Waiting sequences that others have been allowed to pass, because they do not fit."""
        self.round = 0
        """The highest round of a sequence that has started."""
        self._rounds: dict[Group, dict[int, None]] = {}
        """The rounds of each group's sequences that wait for their first start, ascending. No two are equal."""

    def next_round(self, group: Group | None) -> int:
        """The round in which a new sequence runs: the next one, or for a group the one after its last waiting sequence.

        So the requests of a tenant take turns, one sequence of each per round, and those with one sequence start in the
        order of arrival.
        """
        number = self.round + 1
        if group is not None:
            rounds = self._rounds.setdefault(group, {})
            if rounds:
                number = max(number, next(reversed(rounds)) + 1)
            rounds[number] = None
        return number

    def leave_round(self, group: Group | None, number: int, *, has_started: bool) -> None:
        """Note that a sequence no longer waits. A preempted sequence, which waits again, has left its round before."""
        if has_started:
            self.round = max(self.round, number)
        if group is not None and (rounds := self._rounds.get(group)) is not None:
            rounds.pop(number, None)
            if not rounds:
                del self._rounds[group]


NOBODY = TenantAccount(b"", 1.0)
"""The account of sequences that no scheduler knows."""
