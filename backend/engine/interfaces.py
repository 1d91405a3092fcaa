"""What the engine needs from its collaborators: the link to the frontends, and the owner of the device.

`BackendLink` and `Executor` implement these; stand-ins without sockets and threads are in `tools/rig/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.shm.messages import Finish

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.backend.engine.steps.launched_step import PageSaves, StepResult
    from penstock.backend.forward_pass import StepBatch
    from penstock.backend.scheduling.step_plan import Plan
    from penstock.shm.link.events import LinkEvent
    from penstock.shm.messages import EventLogprobs, Failure, Progress, Quote, Started, StreamRecord, VectorPart


class IEngineLink(Protocol):
    """Receives requests and sends their events. Pushes to a request that is not open do nothing."""

    def wait(self, timeout_s: float | None, wake_fd: int) -> None:
        """Sleep until `receive` has something to do, wake_fd is readable, or timeout_s has passed."""
        ...

    def receive(self) -> Iterable[LinkEvent]:
        """All events since the last call, in order."""
        ...

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
        ...

    def push_answer(self, frontend: int, answer: Quote | StreamRecord) -> None: ...

    def push_prompt_logprobs(self, frontend: int, request_id: int, entry: EventLogprobs) -> None: ...

    def push_vectors(
        self, frontend: int, request_id: int, parts: Iterable[VectorPart], started: Started | None = None
    ) -> None:
        """Add a whole result, which ends its request with STOP."""
        ...

    def push_tokens(self, frontend: int, request_ids: list[int], token_ids: list[int]) -> None:
        """`push` one token for each of several requests; no token starts or ends its request."""
        ...

    def note_preemption(self, frontend: int, request_id: int) -> None: ...

    def announce_room(self, frontend: int) -> None: ...

    def flush(self) -> None:
        """Send what was pushed, as far as each frontend takes it."""
        ...


class IExecutor(Protocol):
    """Runs planned steps in order, and holds some plans ready behind the running one."""

    @property
    def wake_fd(self) -> int:
        """Readable when a result is available."""
        ...

    @property
    def has_capacity(self) -> bool:
        """One more plan may be launched."""
        ...

    @property
    def is_busy(self) -> bool: ...

    def running_s(self) -> float:
        """Seconds since the running step began; 0 when none runs."""
        ...

    def launch(self, plan: Plan, batch: StepBatch, saves: PageSaves) -> None:
        """saves are copied before the step, even if none of its rows is left by then."""
        ...

    def results(self) -> list[StepResult]:
        """Results since the last call, in launch order. Raises ExecutorFailed."""
        ...

    def clear_wake(self) -> None:
        """Call before `results`: a result that arrives in between wakes the loop again."""
        ...

    def wake(self) -> None:
        """Safe from any thread and from a signal handler."""
        ...
