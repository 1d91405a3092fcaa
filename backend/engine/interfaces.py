"""Interfaces of the engine's collaborators: the link to the frontends, the executor of steps, and the scheduler.

Stand-ins for link and executor, without sockets and threads, are in `tools/engine_rig.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from penstock.backend.engine.steps.launched_step import PageSaves, StepResult
from penstock.backend.forward_pass import StepBatch
from penstock.backend.kv_cache.host_offload import HostOffload
from penstock.backend.scheduling.outlook import Outlook
from penstock.backend.scheduling.step_plan import Plan
from penstock.backend.sequences.sequence import Sequence
from penstock.shm.link.events import LinkEvent
from penstock.shm.messages import (
    Adapter,
    EventLogprobs,
    Failure,
    Finish,
    Progress,
    Quote,
    Started,
    StreamRecord,
    VectorPart,
)


class IEngineLink(Protocol):
    """Receives requests and sends their events: `BackendLink`. Pushes to a request that is not open do nothing."""

    def wait(self, timeout_s: float | None, wake_fd: int) -> None:
        """Sleep until `receive` has something to do, wake_fd is readable, or timeout_s has passed."""

    def receive(self) -> Iterable[LinkEvent]:
        """All events since the last call, in order."""

    def push(
        self,
        frontend: int,
        request_id: int,
        token_id: int,
        finish: Finish = Finish.NONE,
        started: Started | None = None,
        failure: Failure | None = None,
        logprobs: EventLogprobs | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Add an event. A finish other than NONE closes the request. token_id is NO_TOKEN for an end without one."""

    def push_answer(self, frontend: int, answer: Quote | StreamRecord) -> None: ...

    def push_prompt_logprobs(self, frontend: int, request_id: int, entry: EventLogprobs) -> None: ...

    def push_vectors(
        self, frontend: int, request_id: int, parts: Iterable[VectorPart], started: Started | None = None
    ) -> None:
        """Add a whole result, which ends its request with STOP."""

    def push_tokens(self, frontend: int, request_ids: list[int], token_ids: list[int]) -> None:
        """`push` one token for each of several requests; no token starts or ends its request."""

    def note_preemption(self, frontend: int, request_id: int) -> None: ...

    def announce_room(self, frontend: int) -> None: ...

    def announce_adapters(self, adapters: tuple[Adapter, ...]) -> None:
        """Tell all frontends which adapters the model has."""

    def flush(self) -> None:
        """Send what was pushed, as far as each frontend takes it."""


class IExecutor(Protocol):
    """Runs planned steps in order, and has some plans ready behind the running one: `Executor`."""

    @property
    def wake_fd(self) -> int:
        """Readable when a result is available."""

    @property
    def has_capacity(self) -> bool:
        """One more plan may be launched."""

    @property
    def is_busy(self) -> bool: ...

    def running_s(self) -> float:
        """Seconds since the running step began; 0 when none runs."""

    def launch(self, plan: Plan, batch: StepBatch, saves: PageSaves) -> None:
        """saves are copied before the step, even if none of its rows is left by then."""

    def results(self) -> list[StepResult]:
        """Results since the last call, in launch order. Raises ExecutorFailed."""

    def clear_wake(self) -> None:
        """Call before `results`: a result that arrives in between wakes the loop again."""

    def wake(self) -> None:
        """Safe from any thread and from a signal handler."""


class ISequenceScheduler(Protocol):
    """All sequences that have not ended. Each is either waiting or running.

    `Scheduler` has sequences with pages, `WholeScheduler` those that are computed whole.
    """

    def add(self, sequence: Sequence) -> None:
        """Put the sequence into the wait queue. After an error it has not been added, and `remove` may be called
        nevertheless."""

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended, in any state."""

    def plan(self) -> Plan:
        """Plan the next step; a plan without rows if there is nothing to do."""

    def bisect(self, chunks: list[tuple[Sequence, int]]) -> None:
        """Run each half of a failed step's rows, sequences and numbers of tokens, in steps of its own."""

    def rewind(self, sequence: Sequence, num_computed: int) -> None:
        """Drop the results of a running sequence's steps in flight, and continue after its first
        num_computed tokens."""

    def note_computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that the step that computed the sequence's first num_tokens has been applied."""

    def invalidate_tenant(self, sequence: Sequence) -> None:
        """The sequence's result was bad: keep nothing that was computed for its tenant."""

    def take_saves(self) -> tuple[tuple[int, int], ...]:
        """(page, host place) pairs to copy before the next step."""

    def note_step_ended(self) -> None:
        """Note that the oldest step launched after `take_saves` has ended."""

    def take_preempted(self) -> list[Sequence]:
        """Sequences preempted since the last call, once per preemption."""

    @property
    def has_work(self) -> bool:
        """False if `plan` would return a plan without rows, even after the steps in flight end."""

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
    def checkpoint_bytes(self) -> int:
        """Memory of the states that are kept for others; see `StateCheckpoints`."""

    @property
    def host_offload(self) -> HostOffload: ...

    def num_waiting_of(self, tenant: bytes) -> int: ...

    def share_of(self, tenant: bytes, weight: float) -> float:
        """The part of all places that the tenant may claim, or could claim with a sequence of this weight."""

    def outlook(self) -> Outlook | None:
        """Return what runs and waits. It is the same object until that changes; None if nothing can be predicted."""

    def check_integrity(self) -> None:
        """Raises RuntimeError unless the sequences account for everything that is held."""
