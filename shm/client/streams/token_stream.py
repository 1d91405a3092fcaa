"""The stream of tokens that a submitted request returns."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import msgspec

from penstock.shm.client.streams.open_stream import OpenStream
from penstock.shm.client.streams.reader_turns import ReaderTurns
from penstock.shm.messages import (
    AskQuote,
    AskStream,
    CancelOther,
    ChangeAdapter,
    FailureCode,
    Finish,
    Generate,
    Progress,
)


class LogprobEntry(msgspec.Struct, frozen=True, gc=False):
    """A token's log probability and rank, and those of other tokens at its position.

    The others are the most likely ones, in falling order, or those that the request names. The garbage collector does
    not visit this class: answers have many.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(slots=True)
class TokenBatch:
    """Tokens that arrived since the last batch: at least one, or none if the stream ended without a further token, or
    if the batch only has progress.

    finish is NONE while the stream goes on. With finish STOP the last token id is the stop token; it is not part of
    the text.
    """

    token_ids: list[int]
    finish: Finish = Finish.NONE
    failure: FailureCode | None = None
    failure_limit: int = 0
    failure_text: str = ""
    retry_after_s: int = 0
    """With the failure OVERLOADED; 0 if the backend gives no time (see `BackendClient.retry_after_s`)."""
    logprobs: list[LogprobEntry] | None = None
    """One entry per token id; None unless the request asks for log probabilities."""
    progress: Progress | None = None
    """The latest, before the first token of a request with reports_progress."""


_MAX_BATCH_TOKENS = 64
_MAX_BATCH_LOGPROBS = 8
"""Longer batches would let one reader hold the event loop."""


class TokenStream(OpenStream):
    """The tokens of one request. `async for batch in stream` ends after the batch whose finish is not NONE."""

    __slots__ = ("_delivered", "_ended", "last_token_ns", "pending_logprobs", "progress", "prompt_logprobs", "receive")
    message: Generate

    def __init__(
        self,
        message: Generate,
        tokens: array[int],
        abandon: Callable[[OpenStream, Finish], None],
        deadline_s: float | None = None,
        *,
        turns: ReaderTurns,
        group: int = 0,
    ) -> None:
        super().__init__(message, tokens, abandon, deadline_s, turns=turns, group=group)
        self.prompt_logprobs: list[LogprobEntry] = []
        """One entry per prompt token after the first, if the request asks for them; complete with the first batch."""
        self.last_token_ns = 0
        """CLOCK_MONOTONIC of the last token; 0 before the first."""
        self.pending_logprobs: list[LogprobEntry] | None = [] if message.sampling.num_logprobs >= 0 else None
        """Entries of the tokens that the reader has not taken yet."""
        self.progress: Progress | None = None
        """What the reader has not taken yet."""
        self.receive: Callable[[list[int]], bool] | None = None
        """Called with tokens at the reader's turn instead of waking it, while it waits and the stream goes on. False
        if the reader has to take them. A stream with it has no log probabilities."""
        self._delivered = len(tokens)
        self._ended = False

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
        token_ids = self.tokens[start : self._delivered].tolist()
        self._ended = self.finish is not Finish.NONE and self._delivered == len(self.tokens)
        batch = TokenBatch(token_ids, *self._end) if self._ended else TokenBatch(token_ids)
        if self.pending_logprobs is not None:
            batch.logprobs = self.pending_logprobs[:most]
            del self.pending_logprobs[:most]
        batch.progress, self.progress = (None if batch.token_ids else self.progress), None
        return batch

    def wake_reader(self) -> None:
        if self.receive is None:
            super().wake_reader()
        else:  # `receive` works at once: not before the rest of the message has been read
            self.is_waiting = False
            self._turns.queue(self)

    def resume_reader(self) -> None:
        waiter = self._waiter
        if self.receive is None or self.finish is not Finish.NONE or waiter is None or waiter.done():
            super().resume_reader()
            return
        token_ids = self.tokens[self._delivered : self._delivered + _MAX_BATCH_TOKENS].tolist()
        try:
            is_received = self.receive(token_ids)
        except Exception as error:  # noqa: BLE001 - the reader raises it
            waiter.set_exception(error)
            return
        if not is_received:
            waiter.set_result(None)
            return
        self._delivered += len(token_ids)
        self.is_waiting = self._delivered == len(self.tokens)
        if not self.is_waiting:
            self._turns.queue(self)

    @property
    def _has_news(self) -> bool:
        return self._delivered < len(self.tokens) or self.finish is not Finish.NONE or self.progress is not None

    def note_progress(self, progress: Progress) -> None:
        """Store the latest progress. Called by the client."""
        if not self.has_tokens:
            self.progress = progress
            if self.is_waiting:
                self.wake_reader()

    @property
    def num_generated(self) -> int:
        """Tokens that have been generated, whether or not the reader has taken them."""
        return len(self.tokens) - self.num_prompt_tokens


class AnswerStream(OpenStream):
    """The answer to a request that does not run: its `quote` or its `record`."""

    __slots__ = ()
    message: AskQuote | CancelOther | AskStream | ChangeAdapter

    async def result(self) -> TokenBatch:
        """Wait for the answer. The batch has no tokens: it says how the request ended."""
        if self.finish is Finish.NONE:
            await self._next_turn()
        return TokenBatch([], *self._end)
