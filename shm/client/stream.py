"""The stream of tokens that a submitted request returns."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from penstock.shm.messages import BufferRef, FailureCode, Finish

if TYPE_CHECKING:
    from array import array
    from collections.abc import AsyncIterator, Callable

    from penstock.shm.client.reader_turns import ReaderTurns
    from penstock.shm.messages import Submit


class LogprobEntry(msgspec.Struct, frozen=True, gc=False):
    """One token's log probability and rank, and the most likely tokens at its position, in falling order. The garbage
    collector does not visit it: answers have many."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class TokenBatch:
    """Tokens that arrived since the last batch: at least one, or none if the stream ended without a further token.

    finish is NONE while the stream goes on. With finish STOP the last token id is the stop token; it is not part of
    the text.
    """

    token_ids: list[int]
    finish: Finish = Finish.NONE
    failure: FailureCode | None = None
    failure_limit: int = 0
    failure_text: str = ""
    retry_after_s: int = 0
    """With the failure OVERLOADED; 0 if the backend gives no time, see `BackendClient.retry_after_s`."""
    logprobs: list[LogprobEntry] | None = None
    """One entry per token id; None unless the request asks for log probabilities."""


_MAX_BATCH_TOKENS = 64
_MAX_BATCH_LOGPROBS = 8
"""Longer batches would let one reader hold the event loop."""


class TokenStream:
    """The tokens of one request. `async for batch in stream` ends after the batch whose finish is not NONE.

    One task reads it. A reader that stops before the end must call `cancel`. The attributes and methods after `cancel`
    belong to the client; others may read them.
    """

    __slots__ = (
        "_abandon",
        "_delivered",
        "_ended",
        "_failure",
        "_failure_limit",
        "_failure_text",
        "_retry_after_s",
        "_turns",
        "_waiter",
        "cached_tokens",
        "deadline_s",
        "expiry",
        "finish",
        "group",
        "is_coalesced",
        "is_queued",
        "is_waiting",
        "last_token_ns",
        "num_preemptions",
        "pending_logprobs",
        "prompt_logprobs",
        "queue_s",
        "restarts_without_progress",
        "submit",
        "submitted_ns",
        "tokens",
    )

    def __init__(
        self,
        submit: Submit,
        tokens: array[int],
        abandon: Callable[[TokenStream, Finish], None],
        deadline_s: float | None = None,
        *,
        turns: ReaderTurns,
        group: int = 0,
    ) -> None:
        self.cached_tokens = 0
        """Prompt tokens served from the prefix cache; valid after the first batch."""
        self.is_coalesced: bool | None = None
        """Whether it shares a sequence that another request started; None until the first batch."""
        self.prompt_logprobs: list[LogprobEntry] = []
        """One entry per prompt token after the first, if the request asks for them; complete with the first batch."""
        self.num_preemptions = 0
        """Times that the backend preempted it because KV pages were short."""
        self.queue_s = 0.0
        """Seconds from the backend's receipt to its first step; valid after the first batch."""
        self.submit = submit
        self.submitted_ns = time.monotonic_ns()
        self.tokens = tokens
        """The prompt and all generated tokens: what a new backend receives."""
        self.finish = Finish.NONE
        self.deadline_s = deadline_s
        """time.monotonic() at which it expires."""
        self.expiry: asyncio.TimerHandle | None = None
        self.is_queued = False
        """Waiting in this process; the present backend does not know it."""
        self.last_token_ns = 0
        """CLOCK_MONOTONIC of the last token; 0 before the first."""
        self.restarts_without_progress = 0
        """Backends that died with this stream since its last token."""
        self.pending_logprobs: list[LogprobEntry] | None = [] if submit.sampling.num_logprobs >= 0 else None
        """Entries of the tokens that the reader has not taken yet."""
        self._abandon = abandon
        self._delivered = len(tokens)
        self._failure: FailureCode | None = None
        self._failure_limit = 0
        self._failure_text = ""
        self._retry_after_s = 0
        self._ended = False
        self._turns = turns
        self.group = group
        self._waiter: asyncio.Future[None] | None = None
        self.is_waiting = False
        """The reader waits, and nobody has asked to wake it."""

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        return self

    async def __anext__(self) -> TokenBatch:
        if self._ended:
            raise StopAsyncIteration
        await self._next_turn()
        most = _MAX_BATCH_TOKENS if self.pending_logprobs is None else _MAX_BATCH_LOGPROBS
        if self.finish is Finish.CANCELLED:  # nobody needs the tokens
            most = len(self.tokens)
        start, self._delivered = self._delivered, min(len(self.tokens), self._delivered + most)
        batch = TokenBatch(self.tokens[start : self._delivered].tolist())
        if self.pending_logprobs is not None:
            batch.logprobs = self.pending_logprobs[:most]
            del self.pending_logprobs[:most]
        if self.finish is not Finish.NONE and self._delivered == len(self.tokens):
            self._ended = True
            batch.finish, batch.failure, batch.failure_limit = self.finish, self._failure, self._failure_limit
            batch.failure_text, batch.retry_after_s = self._failure_text, self._retry_after_s
        return batch

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
        return self._delivered < len(self.tokens) or self.finish is not Finish.NONE

    @property
    def num_generated(self) -> int:
        """Tokens that have been generated, whether or not the reader has taken them."""
        return len(self.tokens) - self.submit.num_prompt_tokens

    def cancel(self) -> None:
        """Idempotent; frees the request in the backend. The iterator ends with finish CANCELLED."""
        self._abandon(self, Finish.CANCELLED)

    # Called by the client

    @property
    def request_id(self) -> int:
        return self.submit.request_id

    @property
    def has_tokens(self) -> bool:
        """At least one token has been generated."""
        return self.num_generated > 0

    @property
    def loans(self) -> list[BufferRef]:
        """The shared buffers lent with the request; the backend may have returned them since."""
        return [ref for ref in (self.submit.tokens, self.submit.output) if isinstance(ref, BufferRef)]

    def mark_admitted(self) -> None:
        """Claim its old place: from now on the backend queues it by the time at which it was submitted."""
        if not self.submit.admitted_ns:
            self.submit = msgspec.structs.replace(self.submit, admitted_ns=self.submitted_ns)

    def wake_reader(self) -> None:
        """Call when there is something to read, while `is_waiting`."""
        self.is_waiting = False
        self._turns.wake(self)

    def resume_reader(self) -> None:
        """Called by the turns. The reader may have been cancelled since."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def note_failure(self, code: FailureCode | None, limit: int = 0, text: str = "", retry_after_s: int = 0) -> None:
        """Set the failure that the last batch reports."""
        self._failure, self._failure_limit, self._failure_text = code, limit, text
        self._retry_after_s = retry_after_s

    @property
    def is_refused_by_ending_backend(self) -> bool:
        """Whether the noted failure is that the backend ends."""
        return self._failure is FailureCode.SHUTTING_DOWN

    def end(self, finish: Finish) -> None:
        """Set the finish and wake the reader, which takes the last batch."""
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None
        self.finish = finish
        if self.is_waiting:
            self.wake_reader()
