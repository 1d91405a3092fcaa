"""One request's choices: their token streams, turned into text and into an answer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from frontend.errors import ApiError, ErrorKind, retry_later, shutting_down
from frontend.formats import Usage
from frontend.sse import EventStream
from shm.client import BackendUnavailable
from shm.wire import FailureCode, Finish

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from frontend.detokenizer import Detokenizer
    from frontend.exchange import Exchange, Headers
    from frontend.formats import Format
    from frontend.request_log import RequestRecord
    from frontend.stop_strings import StopMatcher
    from shm.client import TokenBatch, TokenStream

_RETRY_AFTER_S = 1


@dataclass(slots=True)
class Choice:
    """One of an answer's choices: the tokens of one stream become its text."""

    index: int
    prompt_index: int
    stream: TokenStream
    detokenizer: Detokenizer
    stops: StopMatcher
    num_tokens: int = 0
    finish_reason: str | None = None
    parts: list[str] = field(default_factory=list)

    def take(self, batch: TokenBatch) -> str:
        """The text that has become certain.

        With stop strings the tokens are taken one by one, so that how they were batched changes nothing.
        """
        token_ids = batch.token_ids
        self.num_tokens += len(token_ids)
        if batch.finish is Finish.STOP:
            token_ids = token_ids[:-1]
        if not self.stops.active:
            text = self.detokenizer.push(token_ids)
        else:
            text = ""
            for position, token_id in enumerate(token_ids, start=1):
                text += self.stops.push(self.detokenizer.push((token_id,)))
                if self.stops.matched is not None:
                    self.num_tokens += position - len(batch.token_ids)
                    self.finish_reason = "stop"
                    self.stream.cancel()
                    return text
        if batch.finish in (Finish.STOP, Finish.LENGTH):
            text += self.stops.push(self.detokenizer.flush())
            text += self.stops.flush()
            stopped = batch.finish is Finish.STOP or self.stops.matched is not None
            self.finish_reason = "stop" if stopped else "length"
        return text


class Generation:
    """Runs the choices of one request to their end and answers, as a stream or whole."""

    def __init__(self, exchange: Exchange, choices: list[Choice], answer: Format, record: RequestRecord) -> None:
        self._exchange = exchange
        self._choices = choices
        self._answer = answer
        self._record = record

    def cancel(self) -> None:
        """Every stream ends now; cancelling one that has ended is normal."""
        for choice in self._choices:
            choice.stream.cancel()

    async def answer_whole(self) -> None:
        """Raises ApiError, or ClientGoneError."""

        async def collect(choice: Choice, text: str) -> None:
            choice.parts.append(text)

        await self._run_all(collect)
        texts = ["".join(choice.parts) for choice in self._choices]
        reasons = [choice.finish_reason or "stop" for choice in self._choices]
        whole = self._answer.whole(texts, reasons, self._usage())
        await self._exchange.respond(200, whole, self._coalesced_header())

    async def answer_stream(self, *, include_usage: bool) -> None:
        """Raises ApiError before the first event, ClientGoneError; a later error becomes the last event."""
        events = EventStream(self._exchange, self._coalesced_header)
        answer = self._answer

        async def write(choice: Choice, text: str) -> None:
            event = b""
            if not choice.parts:
                event = answer.opening(choice.index)
                choice.parts.append("")  # opened
            if text:
                event += answer.delta(choice.index, text)
            if choice.finish_reason is not None:
                event += answer.closing(choice.index, choice.finish_reason)
            if event:
                await events.write(event)

        try:
            await self._run_all(write)
        except ApiError as error:
            if not self._exchange.started:
                raise
            self._record.finish_reason = outcome(error)
            await events.end_with_error(error)
        else:
            await events.end(answer.usage(self._usage()) if include_usage else b"")

    async def _run_all(self, emit: Callable[[Choice, str], Awaitable[None]]) -> None:
        try:
            if len(self._choices) == 1:
                await self._run(self._choices[0], emit)
            else:
                async with asyncio.TaskGroup() as group:
                    for choice in self._choices:
                        group.create_task(self._run(choice, emit))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self.cancel()
            self._note()
        self._record.finish_reason = self._choices[0].finish_reason or "stop"

    async def _run(self, choice: Choice, emit: Callable[[Choice, str], Awaitable[None]]) -> None:
        try:
            async for batch in choice.stream:
                if batch.token_ids and self._record.first_token_s is None:
                    self._record.first_token_s = time.monotonic()
                if batch.finish is Finish.CANCELLED:
                    choice.num_tokens += len(batch.token_ids)
                    raise self._exchange.ending or shutting_down()
                text = choice.take(batch)
                ends_badly = batch.finish in (Finish.REJECTED, Finish.FAILED, Finish.EXPIRED)
                if batch.token_ids or not ends_badly:
                    await emit(choice, text)
                if choice.finish_reason is not None:
                    return
                if ends_badly:
                    raise _failure(batch, choice.num_tokens)
        except BackendUnavailable:
            raise _unavailable() from None
        raise ApiError(ErrorKind.INTERNAL, "the answer ended before it was complete")

    def _note(self) -> None:
        usage = self._usage()
        self._record.completion_tokens = usage.completion_tokens
        self._record.cached_tokens = usage.cached_tokens
        self._record.coalesced = self._coalesced()

    def _first_streams(self) -> list[TokenStream]:
        """Of each prompt."""
        return list({choice.prompt_index: choice.stream for choice in reversed(self._choices)}.values())

    def _coalesced(self) -> str | None:
        """Whether any prompt's first choice joined what another request had started; None while that is not known.

        Further choices of a greedy request join its own first.
        """
        known = [stream.is_coalesced for stream in self._first_streams() if stream.is_coalesced is not None]
        if not known:
            return None
        return "joined" if any(known) else "none"

    def _coalesced_header(self) -> Headers:
        coalesced = self._coalesced()
        return () if coalesced is None else ((b"x-penstock-coalesced", coalesced.encode()),)

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._record.prompt_tokens,
            completion_tokens=sum(choice.num_tokens for choice in self._choices),
            cached_tokens=sum(stream.cached_tokens for stream in self._first_streams()),
            is_coalesced=self._coalesced() == "joined",
        )


def outcome(error: ApiError) -> str:
    """The finish reason of a request's log line."""
    return "timeout" if error.kind is ErrorKind.EXPIRED else "error"


def _unavailable() -> ApiError:
    return retry_later(ErrorKind.UNAVAILABLE, "the model is not available at the moment", _RETRY_AFTER_S)


def _failure(batch: TokenBatch, num_tokens: int) -> ApiError:
    if batch.finish is Finish.EXPIRED:
        return ApiError(ErrorKind.EXPIRED, f"the request's time limit has passed, after {num_tokens} tokens")
    match batch.failure:
        case FailureCode.OVERLOADED:
            return retry_later(ErrorKind.OVERLOADED, "too many requests are waiting", _RETRY_AFTER_S)
        case FailureCode.CONTEXT_TOO_LONG:
            limit = batch.failure_limit
            message = f"prompt and max_tokens together do not fit: the limit is {limit} tokens"
            return ApiError(ErrorKind.CONTEXT_TOO_LONG, message, param="max_tokens")
        case FailureCode.BAD_TOKEN:
            message = f"a token id is outside the vocabulary of {batch.failure_limit}"
            return ApiError(ErrorKind.INVALID_VALUE, message)
        case FailureCode.SHUTTING_DOWN:
            return shutting_down()
        case FailureCode.UNAVAILABLE:
            return _unavailable()
        case _:
            return ApiError(ErrorKind.INTERNAL, "an internal error ended the answer")
