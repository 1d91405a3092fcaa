"""The common part of the streams of open requests, whether they deliver tokens or vectors."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable

import msgspec

from penstock.shm.client.streams.reader_turns import ReaderTurns
from penstock.shm.messages import BufferRef, ChangeAdapter, FailureCode, Finish, Keep, Quote, Request


class OpenStream:
    """One request, from `BackendClient.submit` to its end. One task reads it.

    A reader that stops before the end must call `cancel`. The attributes and methods after `cancel` belong to the
    client; others may read them.
    """

    __slots__ = (
        "_abandon",
        "_failure",
        "_failure_limit",
        "_failure_text",
        "_retry_after_s",
        "_turns",
        "_waiter",
        "admitted_ns",
        "backend",
        "cached_tokens",
        "deadline_s",
        "expiry",
        "finish",
        "group",
        "is_coalesced",
        "is_queued",
        "is_waiting",
        "keep",
        "loans",
        "message",
        "num_moves",
        "num_preemptions",
        "num_prompt_tokens",
        "pixels",
        "queue_s",
        "quote",
        "record",
        "restarts_without_progress",
        "submitted_ns",
        "tokens",
    )

    def __init__(
        self,
        message: Request,
        tokens: array[int],
        abandon: Callable[[OpenStream, Finish], None],
        deadline_s: float | None = None,
        *,
        turns: ReaderTurns,
        group: int = 0,
    ) -> None:
        """group is 0 for a stream that is read alone."""
        self.cached_tokens = 0
        """Prompt tokens that the backend's caches served; valid after the first batch."""
        self.is_coalesced: bool | None = None
        """Whether it shares a sequence that another request started; None until the first batch."""
        self.backend = ""
        """Name of the replica that computes it; empty if there is only one backend."""
        self.num_moves = 0
        """Times that another replica took it over."""
        self.num_preemptions = 0
        """Times that the backend preempted it because KV pages were short."""
        self.queue_s = 0.0
        """Seconds from the backend's receipt to its first step; valid after the first batch."""
        self.quote: Quote | None = None
        """The backend's prediction, if the request asks for one and is not accepted."""
        self.keep = Keep.NOTHING
        """What the backend keeps after `cancel`."""
        self.record = b""
        """The record of the stream that the request reads."""
        self.message = message
        """Without its tokens and times, which are those of the stream when it is sent."""
        self.submitted_ns = time.monotonic_ns()
        self.admitted_ns = 0
        """`PromptHeader.admitted_ns`."""
        self.num_prompt_tokens = len(tokens)
        self.tokens = tokens
        """The prompt and all generated tokens: what a new backend receives."""
        self.pixels: tuple[bytes, ...] = ()
        """Of the message's pictures."""
        self.loans: list[BufferRef] = []
        """The shared buffers lent with the request; the backend may have returned them since."""
        self.finish = Finish.NONE
        self.deadline_s = deadline_s
        """time.monotonic() at which it expires."""
        self.expiry: asyncio.TimerHandle | None = None
        self.is_queued = False
        """Waiting in this process; the present backend does not know it."""
        self.restarts_without_progress = 0
        """Backends that died with this stream since its last token."""
        self._abandon = abandon
        self._failure: FailureCode | None = None
        self._failure_limit = 0
        self._failure_text = ""
        self._retry_after_s = 0
        self._turns = turns
        self.group = group or -message.request_id - 1  # a number that no caller uses
        self._waiter: asyncio.Future[None] | None = None
        self.is_waiting = False
        """The reader waits, and nobody has asked to wake it."""
        self.restart()

    async def _next_turn(self) -> None:
        """Return when there is something to read and the reader's turn has come."""
        while True:
            self._waiter = asyncio.get_running_loop().create_future()
            self.is_waiting = not self._has_news
            if not self.is_waiting:
                self._turns.queue(self)
            try:
                await self._waiter
            finally:
                self._waiter = None
                self.is_waiting = False
            if self._has_news:  # otherwise the turn was that of an earlier reader, which was cancelled
                return

    @property
    def _has_news(self) -> bool:
        return self.finish is not Finish.NONE

    def cancel(self, keep: Keep = Keep.NOTHING) -> None:
        """Idempotent. Frees the request in the backend, except what a lingering one keeps. The stream ends with finish
        CANCELLED."""
        if self.finish is Finish.NONE:
            self.keep = keep
        self._abandon(self, Finish.CANCELLED)

    # Called by the client

    def expire(self) -> None:
        self._abandon(self, Finish.EXPIRED)

    def move(self, request_id: int, abandon: Callable[[OpenStream, Finish], None]) -> None:
        """Belong to another client from now on.

        The id is new there: late messages of the old backend must not reach the stream if it comes back.
        """
        self.message = msgspec.structs.replace(self.message, request_id=request_id)
        self._abandon = abandon
        self.num_moves += 1

    @property
    def request_id(self) -> int:
        return self.message.request_id

    @property
    def has_tokens(self) -> bool:
        """At least one token has been generated."""
        return len(self.tokens) > self.num_prompt_tokens

    @property
    def is_bound(self) -> bool:
        """It ends with its backend: it uses shared buffers, or changes adapters, which may have ended the backend."""
        return bool(self.loans) or isinstance(self.message, ChangeAdapter)

    def mark_admitted(self) -> None:
        """Ask the backend to queue it by the time at which it was first submitted."""
        self.admitted_ns = self.admitted_ns or self.submitted_ns

    def restart(self) -> None:
        """A backend receives the request: the first one, or another one."""

    def check_finish(self, finish: Finish) -> None:
        """The backend ends the request. Raises LinkBroken if the result is not complete."""

    def wake_reader(self) -> None:
        """Call when there is something to read, while `is_waiting`."""
        self.is_waiting = False
        self._turns.wake(self)

    def resume_reader(self) -> None:
        """Called by the turns. The reader may have been cancelled since."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def note_failure(self, code: FailureCode | None, limit: int = 0, text: str = "", retry_after_s: int = 0) -> None:
        """Set the failure that the reader receives at the end."""
        self._failure, self._failure_limit, self._failure_text = code, limit, text
        self._retry_after_s = retry_after_s

    @property
    def _end(self) -> tuple[Finish, FailureCode | None, int, str, int]:
        """How the request ended: the fields of a `TokenBatch` and of `PooledFailed`."""
        return self.finish, self._failure, self._failure_limit, self._failure_text, self._retry_after_s

    @property
    def is_refused_by_ending_backend(self) -> bool:
        """Whether the noted failure is that the backend ends."""
        return self._failure is FailureCode.SHUTTING_DOWN

    def end(self, finish: Finish) -> None:
        """Set the finish and wake the reader."""
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None
        self.finish = finish
        if self.is_waiting:
            self.wake_reader()
