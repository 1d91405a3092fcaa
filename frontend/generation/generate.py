"""One request's choices, run to their end and turned into an answer."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from penstock.frontend.parsing.deltas import ChoiceOutput, Delta
from penstock.frontend.telemetry.timings import Timings
from penstock.frontend.transport.errors import ApiError, ErrorKind, retry_later, shutting_down
from penstock.frontend.transport.sse import EventStream
from penstock.shm.client import BackendUnavailable
from penstock.shm.messages import FailureCode, Finish

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from penstock.frontend.formats.base import Format, Usage
    from penstock.frontend.generation.choice import Choice
    from penstock.frontend.telemetry.request_log import RequestLogEntry
    from penstock.frontend.transport.asgi import Headers
    from penstock.frontend.transport.exchange import Exchange
    from penstock.shm.client import TokenBatch, TokenStream

_RETRY_AFTER_S = 1
_INLINE_LOGPROBS = 64
"""Tokens; more at once, as those of a prompt are, become a part of the answer in a thread."""
_SHOWN_CHARACTERS = 200
"""Of what is wrong with a grammar."""


class Generation:
    """Runs the choices of one request to their end and answers, as a stream or whole."""

    def __init__(
        self,
        exchange: Exchange,
        choices: list[Choice],
        answer: Format,
        usage: Usage,
        record: RequestLogEntry,
    ) -> None:
        """usage is what the answer's format reads as well; it is kept up to date here."""
        self._exchange = exchange
        self._choices = choices
        self._answer = answer
        self._usage = usage
        self._record = record
        self._submitted_s = time.monotonic()

    def cancel(self) -> None:
        """Every stream ends now; cancelling one that has ended is normal."""
        for choice in self._choices:
            choice.stream.cancel()

    async def answer_whole(self, num_best: int | None = None) -> None:
        """All choices, or of each prompt's the num_best whose tokens were the likeliest on average.

        Raises ApiError, or ClientGoneError.
        """
        messages = {choice.index: ChoiceOutput() for choice in self._choices}

        async def collect(choice: Choice, delta: Delta) -> None:
            messages[choice.index].add(delta)

        await self._run_all(collect)
        kept = self._choices if num_best is None else _likeliest(self._choices, num_best)

        def tell() -> bytes:
            for choice in kept:
                choice.finish(messages[choice.index])
            return self._answer.whole([messages[choice.index] for choice in kept])

        # Hundreds of thousands of log probabilities may have come with the prompt's end.
        whole = await asyncio.to_thread(tell) if kept[0].reports_prompt_logprobs else tell()
        await self._exchange.respond(200, whole, self._headers(is_whole=True))

    async def answer_stream(self) -> None:
        """Raises ApiError before the first event, ClientGoneError; a later error becomes the last event."""
        events = EventStream(self._exchange, self._headers)
        answer = self._answer
        opened: set[int] = set()
        # Choices of one request mostly get their tokens in the same turn of the loop.
        send = events.write if len(self._choices) == 1 else events.write_together

        async def write(choice: Choice, delta: Delta) -> None:
            event = b""
            if choice.index not in opened:
                opened.add(choice.index)
                event = answer.opening(choice.index, choice.reported_prompt)
            if len(delta.logprobs) > _INLINE_LOGPROBS:
                event += await asyncio.to_thread(answer.delta, choice.index, delta)
            elif delta:
                event += answer.delta(choice.index, delta)
            if choice.finish_reason is not None:
                event += answer.closing(choice.index, choice.finish_reason, choice.stopped_by)
            if event:
                await send(event)

        try:
            await self._run_all(write)
        except ApiError as error:
            if not self._exchange.started:
                raise
            self._record.finish_reason = outcome(error)
            await events.end(answer.failure(error))
        else:
            await events.end(answer.end())

    async def _run_all(self, emit: Callable[[Choice, Delta], Awaitable[None]]) -> None:
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

    async def _run(self, choice: Choice, emit: Callable[[Choice, Delta], Awaitable[None]]) -> None:
        try:
            async for batch in choice.stream:
                if batch.token_ids and self._record.first_token_s is None:
                    self._record.first_token_s = time.monotonic()
                if batch.token_ids and choice.num_tokens == 0 and choice.reports_prompt_logprobs:
                    await asyncio.to_thread(choice.prepare_echo)
                if batch.finish is Finish.CANCELLED:
                    self._usage.completion_tokens += len(batch.token_ids)
                    raise self._exchange.ending or shutting_down()
                delta = self._take(choice, batch)
                ends_badly = batch.finish in (Finish.REJECTED, Finish.FAILED, Finish.EXPIRED)
                if batch.token_ids or not ends_badly:
                    await emit(choice, delta)
                if choice.finish_reason is not None:
                    return
                if ends_badly:
                    raise _failure(batch, choice.num_tokens, choice.grammar_field)
        except BackendUnavailable:
            raise _unavailable() from None
        raise ApiError(ErrorKind.INTERNAL, "the answer ended before it was complete")

    def _take(self, choice: Choice, batch: TokenBatch) -> Delta:
        usage, is_first = self._usage, choice.num_tokens == 0
        num_tokens, num_reasoning_tokens = choice.num_tokens, choice.num_reasoning_tokens
        delta = choice.take(batch)
        usage.completion_tokens += choice.num_tokens - num_tokens
        usage.reasoning_tokens += choice.num_reasoning_tokens - num_reasoning_tokens
        if is_first:
            usage.cached_tokens = sum(stream.cached_tokens for stream in self._first_streams())
            usage.is_coalesced = self._coalesced() == "joined"
        return delta

    def _note(self) -> None:
        self._record.completion_tokens = self._usage.completion_tokens
        self._record.cached_tokens = self._usage.cached_tokens
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

    def timings(self) -> Timings:
        """As they stand. The queue is that of the first stream."""
        usage = self._usage
        return Timings(
            received_s=self._exchange.received_s,
            submitted_s=self._submitted_s,
            first_token_s=self._record.first_token_s,
            now_s=time.monotonic(),
            queue_s=self._choices[0].stream.queue_s,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            num_preemptions=sum(choice.stream.num_preemptions for choice in self._choices),
        )

    def _headers(self, *, is_whole: bool = False) -> Headers:
        """What is known when they go; before the first token that is nothing."""
        coalesced = self._coalesced()
        if coalesced is None or self._record.first_token_s is None:
            return ()
        timing = self.timings().server_timing(is_whole=is_whole)
        return ((b"x-penstock-coalesced", coalesced.encode()), (b"server-timing", timing))


def _likeliest(choices: list[Choice], num_best: int) -> list[Choice]:
    """Of each prompt's choices those with the highest log probability per token, best first."""
    kept: list[Choice] = []
    for prompt_index in dict.fromkeys(choice.prompt_index for choice in choices):
        of_prompt = [choice for choice in choices if choice.prompt_index == prompt_index]
        of_prompt.sort(key=lambda choice: choice.sum_logprob / max(1, choice.num_tokens), reverse=True)
        kept += of_prompt[:num_best]
    return kept


def outcome(error: ApiError) -> str:
    """The finish reason of a request's log line."""
    return "timeout" if error.kind is ErrorKind.EXPIRED else "error"


def _unavailable() -> ApiError:
    return retry_later(ErrorKind.UNAVAILABLE, "the model is not available at the moment", _RETRY_AFTER_S)


def _failure(batch: TokenBatch, num_tokens: int, grammar_field: str | None) -> ApiError:
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
        case FailureCode.BAD_GRAMMAR:
            said = msgspec.json.encode(batch.failure_text[:_SHOWN_CHARACTERS]).decode()
            field = "" if grammar_field is None else f"{grammar_field}: "
            message = f"{field}the grammar cannot be used: {said}"
            return ApiError(ErrorKind.INVALID_VALUE, message, param=grammar_field)
        case FailureCode.SHUTTING_DOWN:
            return shutting_down()
        case FailureCode.UNAVAILABLE:
            return _unavailable()
        case _:
            return ApiError(ErrorKind.INTERNAL, "an internal error ended the answer")
