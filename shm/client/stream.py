"""What a client asks for, and the stream of tokens that it gets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.shm.messages import BufferRef, FailureCode, Finish, Sampling

if TYPE_CHECKING:
    from array import array
    from collections.abc import AsyncIterator, Callable, Sequence

    from penstock.shm.buffers.shared_buffers import BufferSlice
    from penstock.shm.messages import Constraints, Submit


@dataclass(slots=True)
class GenerationRequest:
    """What to run. token_ids within the model's context; max_tokens counts generated tokens.

    A request that uses shared buffers ends with its backend, for they do: FAILED, UNAVAILABLE.
    """

    token_ids: Sequence[int] | BufferSlice
    """The prompt, or the buffer that holds it. One of tokens is the caller's again when the first tokens come; one of
    embeddings is read in place and comes back as `output` does. A request with those joins no other, and has no
    log probabilities of its prompt."""
    max_tokens: int
    sampling: Sampling
    stop_token_ids: tuple[int, ...] = ()
    salt: bytes = b""
    may_share: bool = False
    priority: int = 0
    deadline_s: float | None = None
    """time.monotonic() at which the stream ends EXPIRED, wherever it is then. The others are as in `Submit`."""
    constraints: Constraints | None = None
    num_prompt_logprobs: int = -1
    output: BufferSlice | None = None
    """What else than tokens is wanted, of the first generated tokens; the buffer is the caller's again when the stream
    has ended, or soon after it was cancelled. Such a request joins no other."""
    batch_delivery: bool = False
    """The tokens are wanted together: they come many at a time, up to a quarter of a second late."""


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """One token's log probability and rank, and the likeliest tokens at its place, falling."""

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class TokenBatch:
    """Tokens that arrived since the last batch, one or more; or none, where the stream ended without a token.

    finish is NONE while the stream goes on. With finish STOP the last token id is the stop token, not part of the text.
    """

    token_ids: list[int]
    finish: Finish = Finish.NONE
    failure: FailureCode | None = None
    failure_limit: int = 0
    failure_text: str = ""
    logprobs: list[LogprobEntry] | None = None
    """One for each of token_ids, where the request asks for them."""


class TokenStream:
    """One subscriber's tokens. `async for batch in stream` ends after the batch whose finish is not NONE.

    One task reads it; whoever stops reading before the end calls `cancel`.
    """

    __slots__ = (
        "_cancel",
        "_deadline_s",
        "_delivered",
        "_ended",
        "_expiry",
        "_failure",
        "_failure_limit",
        "_failure_text",
        "_finish",
        "_fruitless_lives",
        "_last_token_ns",
        "_logprobs",
        "_queued",
        "_submit",
        "_tokens",
        "_waiter",
        "cached_tokens",
        "is_coalesced",
        "num_preemptions",
        "prompt_logprobs",
        "queue_s",
    )

    def __init__(
        self,
        submit: Submit,
        tokens: array[int],
        cancel: Callable[[TokenStream], None],
        deadline_s: float | None = None,
    ) -> None:
        self.cached_tokens = 0
        """Prompt tokens served from the prefix cache; known once the first batch has come."""
        self.is_coalesced: bool | None = None
        """Whether it listens to what another request had started; None until the first batch has come."""
        self.prompt_logprobs: list[LogprobEntry] = []
        """Of the prompt's tokens but the first, where the request asks for them; complete with the first batch."""
        self.num_preemptions = 0
        """Times that it was set back because pages were short."""
        self.queue_s = 0.0
        """Seconds from the backend's receipt to its first step; known once the first batch has come."""
        self._submit = submit
        self._tokens = tokens  # the prompt and all that was generated: what a new backend is sent
        self._delivered = len(tokens)
        self._cancel = cancel
        self._deadline_s = deadline_s
        self._expiry: asyncio.TimerHandle | None = None
        self._queued = False  # waits in the client: no backend, or not the present one, knows of it
        self._last_token_ns = 0  # CLOCK_MONOTONIC; 0 before the first
        self._fruitless_lives = 0  # backends that died with this stream since its last token
        self._finish = Finish.NONE
        self._failure: FailureCode | None = None
        self._failure_limit = 0
        self._failure_text = ""
        self._logprobs: list[LogprobEntry] | None = [] if submit.sampling.num_logprobs >= 0 else None
        """Of the tokens that are not delivered yet."""
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        return self

    async def __anext__(self) -> TokenBatch:
        if self._ended:
            raise StopAsyncIteration
        while self._delivered == len(self._tokens) and self._finish is Finish.NONE:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        batch = TokenBatch(self._tokens[self._delivered :].tolist())
        self._delivered = len(self._tokens)
        if self._logprobs is not None:
            batch.logprobs, self._logprobs = self._logprobs, []
        if self._finish is not Finish.NONE:
            self._ended = True
            batch.finish, batch.failure, batch.failure_limit = self._finish, self._failure, self._failure_limit
            batch.failure_text = self._failure_text
        return batch

    def cancel(self) -> None:
        """Idempotent; frees the request in the backend. The iterator, if waiting, ends with finish CANCELLED."""
        self._cancel(self)

    @property
    def _loans(self) -> list[BufferRef]:
        """The shared buffers that were lent with it, and may have come back since."""
        return [ref for ref in (self._submit.tokens, self._submit.output) if isinstance(ref, BufferRef)]

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
