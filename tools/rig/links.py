"""Links without sockets: arrivals are put in by hand, and nothing is sent."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING

from penstock.backend.engine.interfaces import IEngineLink
from penstock.shm.messages import NO_TOKEN, Finish

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.shm.link.events import LinkEvent
    from penstock.shm.messages import EventLogprobs, Failure, Progress, Quote, Started, StreamRecord, VectorPart


class DroppingLink(IEngineLink):
    """Drops all messages. Subclasses look at what they need: every token and every end passes through `push`."""

    def __init__(self) -> None:
        self.arrivals: list[LinkEvent] = []
        """What the next `receive` returns."""

    def wait(self, timeout_s: float | None, wake_fd: int) -> None:
        """Wait for the executor alone: nothing arrives meanwhile."""
        if not self.arrivals:
            select.select([wake_fd], [], [], timeout_s)

    def receive(self) -> Iterable[LinkEvent]:
        arrived, self.arrivals = self.arrivals, []
        return arrived

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
        pass

    def push_answer(self, frontend: int, answer: Quote | StreamRecord) -> None:
        pass

    def push_prompt_logprobs(self, frontend: int, request_id: int, entry: EventLogprobs) -> None:
        pass

    def push_vectors(
        self,
        frontend: int,
        request_id: int,
        parts: Iterable[VectorPart],  # noqa: ARG002 - dropped, as by every stub here
        started: Started | None = None,
    ) -> None:
        self.push(frontend, request_id, NO_TOKEN, Finish.STOP, started)

    def push_tokens(self, frontend: int, request_ids: list[int], token_ids: list[int]) -> None:
        for request_id, token_id in zip(request_ids, token_ids, strict=True):
            self.push(frontend, request_id, token_id)

    def note_preemption(self, frontend: int, request_id: int) -> None:
        pass

    def announce_room(self, frontend: int) -> None:
        pass

    def flush(self) -> None:
        pass
