"""The interface of a scheduler. There are two: for sequences with pages, and for sequences computed whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.backend.kv_cache.host_offload import HostOffload
    from penstock.backend.scheduling.outlook import Outlook
    from penstock.backend.scheduling.step_plan import Plan
    from penstock.backend.sequences.sequence import Sequence


class ISequenceScheduler(Protocol):
    """All sequences that have not ended. Each is either waiting or running."""

    def add(self, sequence: Sequence) -> None:
        """Put the sequence into the wait queue. After an error it has not been added, and `remove` may be called
        nevertheless."""
        ...

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended, in any state."""
        ...

    def plan(self) -> Plan:
        """Plan the next step; a plan without rows if there is nothing to do."""
        ...

    def bisect(self, chunks: list[tuple[Sequence, int]]) -> None:
        """Run each half of a failed step's rows, sequences and numbers of tokens, in steps of its own."""
        ...

    def rewind(self, sequence: Sequence, num_computed: int) -> None:
        """Drop the results of a running sequence's steps in flight, and continue after its first
        num_computed tokens."""
        ...

    def note_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that the step that computed the sequence's first num_tokens has been applied."""
        ...

    def invalidate_tenant(self, sequence: Sequence) -> None:
        """The sequence's result was bad: keep nothing that was computed for its tenant."""
        ...

    def take_saves(self) -> tuple[tuple[int, int], ...]:
        """(page, host place) pairs to copy before the next step."""
        ...

    def take_preempted(self) -> list[Sequence]:
        """Sequences preempted since the last call, once per preemption."""
        ...

    @property
    def has_work(self) -> bool:
        """False if `plan` would return a plan without rows, even after the steps in flight end."""
        ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_preemptions(self) -> int: ...

    @property
    def num_free_slots(self) -> int: ...

    @property
    def num_pages_held(self) -> int: ...

    @property
    def num_pages_idle(self) -> int: ...

    @property
    def host_offload(self) -> HostOffload: ...

    def num_waiting_of(self, tenant: bytes) -> int: ...

    def share_of(self, tenant: bytes, weight: float) -> float:
        """The part of all places that the tenant may claim, or could claim with a sequence of this weight."""
        ...

    def outlook(self, sequence: Sequence) -> Outlook | None:
        """The running sequences, and those that start before the sequence, which waits or has not been added; None if
        unknown."""
        ...

    def check_integrity(self) -> None:
        """Raises RuntimeError unless the sequences account for everything that is held."""
        ...
