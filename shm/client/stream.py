"""The stream of tokens that a submitted request returns."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.shm.messages import BufferRef, FailureCode, Finish

if TYPE_CHECKING:
    from array import array
    from collections.abc import AsyncIterator, Callable

    from penstock.shm.messages import Submit


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """One token's log probability and rank, and the most likely tokens at its position, in falling order."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class TokenBatch:
    """The tokens that arrived since the last batch: at least one, or none if the stream ended without a token.

    finish is NONE while the stream goes on. With finish STOP the last token id is the stop token; it is not part of
    the text.
    """

    token_ids: list[int]
    finish: Finish = Finish.NONE
    failure: FailureCode | None = None
    failure_limit: int = 0
    failure_text: str = ""
    logprobs: list[LogprobEntry] | None = None
    """One entry per token id; None unless the request asks for log probabilities."""


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
        "_waiter",
        "cached_tokens",
        "deadline_s",
        "expiry",
        "finish",
        "is_coalesced",
        "is_queued",
        "last_token_ns",
        "num_preemptions",
        "pending_logprobs",
        "prompt_logprobs",
        "queue_s",
        "restarts_without_progress",
        "submit",
        "tokens",
    )

    def __init__(
        self,
        submit: Submit,
        tokens: array[int],
        abandon: Callable[[TokenStream, Finish], None],
        deadline_s: float | None = None,
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
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        return self

    async def __anext__(self) -> TokenBatch:
        if self._ended:
            raise StopAsyncIteration
        while self._delivered == len(self.tokens) and self.finish is Finish.NONE:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        batch = TokenBatch(self.tokens[self._delivered :].tolist())
        self._delivered = len(self.tokens)
        if self.pending_logprobs is not None:
            batch.logprobs, self.pending_logprobs = self.pending_logprobs, []
        if self.finish is not Finish.NONE:
            self._ended = True
            batch.finish, batch.failure, batch.failure_limit = self.finish, self._failure, self._failure_limit
            batch.failure_text = self._failure_text
        return batch

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
        return len(self.tokens) > self.submit.num_prompt_tokens

    @property
    def loans(self) -> list[BufferRef]:
        """The shared buffers lent with the request; the backend may have returned them since."""
        return [ref for ref in (self.submit.tokens, self.submit.output) if isinstance(ref, BufferRef)]

    def append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.restarts_without_progress = 0
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def note_failure(self, code: FailureCode, limit: int = 0, text: str = "") -> None:
        """Set the failure that the last batch reports."""
        self._failure, self._failure_limit, self._failure_text = code, limit, text

    def end(self, finish: Finish) -> None:
        """Set the finish and wake the reader, which takes the last batch."""
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None
        self.finish = finish
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
