"""Lets open streams survive their backend: the next one with the same model receives the prompt and the tokens so far.

Sampling depends on the position, not on history, so the continuation is the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable

from penstock.shm.client.counters import ClientCounters
from penstock.shm.client.outbox import Outbox
from penstock.shm.client.queued_requests import QueuedRequests
from penstock.shm.client.streams.open_stream import OpenStream
from penstock.shm.client.streams.stream_table import OpenStreams
from penstock.shm.messages import FailureCode, Finish

logger = logging.getLogger("penstock.client")

_SUSPECT_AFTER_RESTARTS = 2
_MAX_RESTARTS_WITHOUT_PROGRESS = 4
"""A request is given up when more backends than this have died with it in a row and none gave it a token."""


class Resubmission:
    """Submits open streams again, and isolates those that may kill backends.

    A stream is a suspect if two backends in a row died with it and gave it no token. Suspects are submitted one at a
    time, so that innocent streams make progress and the guilty one is given up.
    """

    def __init__(
        self, streams: OpenStreams, outbox: Outbox, held: QueuedRequests, counters: ClientCounters, timeout_s: float
    ) -> None:
        """timeout_s is how long streams wait for the next backend before they fail. Held ones have their own limit."""
        self._streams = streams
        self._outbox = outbox
        self._held = held
        self._counters = counters
        self._timeout_s = timeout_s
        self._suspects: deque[OpenStream] = deque()  # most innocent first
        self._isolated: OpenStream | None = None  # the suspect that was submitted last
        self._give_up: asyncio.TimerHandle | None = None

    def backend_died(self) -> None:
        """Empty the outbox: the next backend receives all open streams, and needs no cancels."""
        self._outbox.clear()
        self._suspects.clear()
        if self._streams:
            self._give_up = asyncio.get_running_loop().call_later(self._timeout_s, self._fail_all)

    def _fail_all(self) -> None:
        held = self._held.streams()
        for stream in self._streams:
            if stream not in held:
                self._streams.fail(stream, FailureCode.UNAVAILABLE)

    def stop_waiting(self) -> None:
        """Cancel the timeout: a backend has connected, or the client closes."""
        if self._give_up is not None:
            self._give_up.cancel()
            self._give_up = None

    def resume(self) -> None:
        """Queue the open streams for the new backend, held ones too, in the order in which they were submitted."""
        self._held.clear()
        self._suspects.clear()
        self._isolated = None
        self.take_over(self._streams, backend_died=True)

    def take_over(self, streams: Iterable[OpenStream], *, backend_died: bool) -> None:
        """Queue streams that another client's backend had or was about to receive. backend_died: it died with them."""
        suspects = list(self._suspects)
        for stream in streams:
            is_first_time = not stream.admitted_ns and stream.is_queued
            stream.mark_admitted()
            stream.restart()
            if backend_died and not stream.is_queued:
                stream.restarts_without_progress += 1
            if stream.restarts_without_progress > _MAX_RESTARTS_WITHOUT_PROGRESS:
                logger.error(
                    "a request of %d prompt tokens is given up: %d backends in a row died with it",
                    stream.num_prompt_tokens,
                    stream.restarts_without_progress,
                )
                self._streams.fail(stream, FailureCode.INTERNAL)
                continue
            self._counters.board.requests_resumed += not is_first_time
            if stream.restarts_without_progress < _SUSPECT_AFTER_RESTARTS:
                self._outbox.submit(stream)
            else:
                stream.is_queued = True
                suspects.append(stream)
        self._suspects = deque(sorted(suspects, key=lambda stream: stream.restarts_without_progress))

    def give(self, streams: Iterable[OpenStream], *, is_alive: bool) -> list[OpenStream]:
        """Remove the open streams that another client can continue. If the backend is alive, it cancels them."""
        given = {stream: None for stream in streams if not stream.is_bound}
        for stream in given:
            if is_alive and not stream.is_queued:
                self._outbox.cancel(stream.request_id)
            self._streams.remove(stream)
        self._outbox.forget(given)
        self._held.forget(given)
        self._suspects = deque(stream for stream in self._suspects if stream not in given)
        if self._isolated in given:
            self._isolated = None
        if not self._streams:
            self.stop_waiting()
        return list(given)

    def submit_next_suspect(self) -> None:
        """Queue the next suspect once the isolated one has received a token or has ended."""
        while self._suspects:
            isolated = self._isolated
            if isolated is not None and isolated.restarts_without_progress and isolated.finish is Finish.NONE:
                return
            self._isolated = self._suspects.popleft()
            self._outbox.submit(self._isolated)
