"""Runs the choices of one request to their end, and keeps the request's counts."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.frontend.formats.base import Usage
from penstock.frontend.generation.choices.choice import Choice
from penstock.frontend.generation.failures import backend_unavailable, stream_failure, too_late
from penstock.frontend.parsing.deltas import Delta, with_call_ids
from penstock.frontend.telemetry.request_log import RequestLogEntry
from penstock.frontend.telemetry.timings import Timings, prompt_progress
from penstock.frontend.transport.asgi import Headers
from penstock.frontend.transport.errors import ApiError, ErrorKind, shutting_down
from penstock.frontend.transport.exchange import Exchange
from penstock.shm.client import BackendUnavailable, Progress, ServingClient, TokenBatch, TokenStream
from penstock.shm.messages import FailureCode, Finish, Keep

Emit = Callable[[Choice, Delta], Awaitable[None]]
FormatDelta = Callable[[int, Delta], bytes]


class ChoiceRunner:
    """Reads all streams of one request and passes on their pieces."""

    def __init__(
        self,
        exchange: Exchange,
        choices: list[Choice],
        usage: Usage,
        log_entry: RequestLogEntry,
        backend: ServingClient,
        *,
        by_token: bool = False,
        call_ids: str | None = None,
    ) -> None:
        """usage and log_entry are kept up to date while the choices run. by_token makes a piece of each token, also of
        those that arrive together, and takes the choices in turn. call_ids determines the ids of tool calls; None makes
        random ones."""
        self.choices = choices
        self._exchange = exchange
        self._backend = backend
        self._usage = usage
        self._log_entry = log_entry
        self._by_token = by_token
        self._call_ids = call_ids
        self._progress: Progress | None = None
        """The latest, until the first token."""
        self._submitted_s = log_entry.submitted_s = time.monotonic()

    def cancel(self) -> None:
        """End every stream now.

        Ended streams are left alone, and the backend continues streams that linger, if the client knows their id.
        """
        keep = Keep.ALL if self._exchange.started else Keep.NOTHING
        for choice in self.choices:
            choice.stream.cancel(keep)

    async def run(self, emit: Emit, format_delta: FormatDelta | None = None) -> None:
        """Run all choices, several at the same time. emit receives each piece, empty ones too.

        With format_delta pieces of plain text may be sent without emit. Raises ApiError, ClientGoneError.
        """
        try:
            if len(self.choices) == 1:
                await self._run(self.choices[0], emit, format_delta)
            elif self._by_token:
                await self._run_in_turn(emit)
            else:
                async with asyncio.TaskGroup() as group:
                    for choice in self.choices:
                        group.create_task(self._run(choice, emit))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            self.cancel()
            self._usage.completion_tokens = sum(choice.num_generated for choice in self.choices)
            if self._exchange.claim is not None:
                self._exchange.claim.settle(self._num_tokens_used())
            self._log_entry.completion_tokens = self._usage.completion_tokens
            self._log_entry.cached_tokens = self._usage.cached_tokens
            self._log_entry.coalesced = self._coalesced()
            self._log_entry.queue_s = self.choices[0].stream.queue_s
            self._log_entry.note_replicas(choice.stream for choice in self.choices)
        self._log_entry.finish_reason = self.choices[0].finish_reason or "stop"

    async def _run(self, choice: Choice, emit: Emit, format_delta: FormatDelta | None = None) -> None:
        if self._by_token or not choice.is_text_only or self._log_entry.report_spans is not None:
            format_delta = None
        try:
            async for batch in choice.stream:
                for piece in _single(batch) if self._by_token else (batch,):
                    await self._pass_on(choice, piece, emit)
                    if choice.finish_reason is not None:
                        return
                if format_delta is not None and choice.num_tokens and self._exchange.started:
                    choice.stream.receive = partial(self._send_text, choice, format_delta)
        except BackendUnavailable:
            raise backend_unavailable(self._backend.retry_after_s) from None
        raise _broken_off()

    def _send_text(self, choice: Choice, format_delta: FormatDelta, token_ids: list[int]) -> bool:
        """Send tokens in the middle of a plain text without waking the request's task, if the client takes them."""
        if not self._exchange.takes_part():
            return False
        delta = self._take(choice, TokenBatch(token_ids))
        if delta.text:
            self._exchange.write_part(format_delta(choice.index, delta))
        return True

    async def _run_in_turn(self, emit: Emit) -> None:
        """Pass on a piece of each choice, then the next of each, so that a repetition has the same order."""
        unread: dict[Choice, deque[TokenBatch]] = {choice: deque() for choice in self.choices}
        while unread:
            for choice, pieces in unread.items():
                while not pieces:
                    pieces.extend(await self._next_pieces(choice))
            for choice, pieces in list(unread.items()):
                await self._pass_on(choice, pieces.popleft(), emit)
                if choice.finish_reason is not None:
                    del unread[choice]

    async def _next_pieces(self, choice: Choice) -> Iterator[TokenBatch]:
        try:
            return _single(await anext(choice.stream))
        except BackendUnavailable:
            raise backend_unavailable(self._backend.retry_after_s) from None
        except StopAsyncIteration:
            raise _broken_off() from None

    async def _pass_on(self, choice: Choice, batch: TokenBatch, emit: Emit) -> None:
        if batch.progress is not None and batch.finish is Finish.NONE:
            self._progress = batch.progress
            await emit(choice, Delta(has_progress=True))
            return
        if batch.token_ids and self._log_entry.first_token_s is None:
            self._log_entry.first_token_s = time.monotonic()
        if self._log_entry.report_spans is not None:
            self._log_entry.last_token_s = time.monotonic()
        if batch.token_ids and choice.num_tokens == 0 and choice.reports_prompt_logprobs:
            await asyncio.to_thread(choice.prepare_echo)
        if batch.finish is Finish.CANCELLED:
            raise self._exchange.ending or shutting_down()
        delta = self._take(choice, batch)
        if self._call_ids is not None:
            delta = with_call_ids(delta, f"{self._call_ids} {choice.index}")
        has_failed = batch.finish in (Finish.REJECTED, Finish.FAILED, Finish.EXPIRED)
        if batch.token_ids and self._progress is not None:
            self._progress = None
            await emit(choice, Delta(has_progress=True))
        if batch.token_ids or not has_failed:
            await emit(choice, delta)
        if has_failed and choice.finish_reason is None:
            if batch.failure is FailureCode.TOO_LATE:
                raise too_late(choice.stream, batch.retry_after_s)
            raise stream_failure(batch, choice.num_tokens, choice.grammar_field, self._backend.retry_after_s)

    def _take(self, choice: Choice, batch: TokenBatch) -> Delta:
        usage, is_first = self._usage, choice.num_tokens == 0
        num_tokens, num_reasoning_tokens = choice.num_tokens, choice.num_reasoning_tokens
        delta = choice.take(batch)
        usage.completion_tokens += choice.num_tokens - num_tokens
        usage.reasoning_tokens += choice.num_reasoning_tokens - num_reasoning_tokens
        if is_first:
            usage.cached_tokens = sum(stream.cached_tokens for stream in self._first_streams())
            usage.is_coalesced = self._coalesced() == "joined"
        if self._exchange.claim is not None:
            self._exchange.claim.grow_to(usage.prompt_tokens + usage.completion_tokens)
        return delta

    def _num_tokens_used(self) -> int:
        """Return the tokens that count against the key's limit: the generated ones, and each prompt that was not
        refused."""
        accepted = {choice.prompt.index: len(choice.prompt.token_ids) for choice in self.choices if choice.is_accepted}
        return sum(accepted.values()) + self._usage.completion_tokens

    def timings(self) -> Timings:
        """Return the timings so far. The queue time is that of the first stream."""
        usage = self._usage
        return Timings(
            received_s=self._exchange.received_s,
            submitted_s=self._submitted_s,
            first_token_s=self._log_entry.first_token_s,
            now_s=time.monotonic(),
            queue_s=self.choices[0].stream.queue_s,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            num_preemptions=sum(choice.stream.num_preemptions for choice in self.choices),
        )

    def prompt_progress(self) -> dict[str, Any]:
        """Return llama.cpp's progress of the prompt. The last one, with the first token, covers the whole prompt."""
        if self._progress is None:
            return self.timings().prompt_progress()
        known = self._progress
        return prompt_progress(self._usage.prompt_tokens, known.cached_tokens, known.computed_tokens, known.spent_s)

    def headers(self, *, is_whole: bool = False) -> Headers:
        """Return the response headers with what is known so far: nothing before the first token."""
        coalesced = self._coalesced()
        if coalesced is None or self._log_entry.first_token_s is None:
            return ()
        timing = self.timings().server_timing(is_whole=is_whole)
        return ((b"x-penstock-coalesced", coalesced.encode()), (b"server-timing", timing))

    def _coalesced(self) -> str | None:
        """Return joined if the first choice of any prompt joined another request's sequence, else none; None while
        unknown.

        The other choices of a greedy request join the request's own first choice.
        """
        known = [stream.is_coalesced for stream in self._first_streams() if stream.is_coalesced is not None]
        if not known:
            return None
        return "joined" if any(known) else "none"

    def _first_streams(self) -> list[TokenStream]:
        """Return the stream of each prompt's first choice."""
        return list({choice.prompt.index: choice.stream for choice in reversed(self.choices)}.values())


def _broken_off() -> ApiError:
    return ApiError(ErrorKind.INTERNAL, "the answer ended before it was complete")


def _single(batch: TokenBatch) -> Iterator[TokenBatch]:
    """Yield a batch for each token, and one for the end, which has a token only if that is a stop token.

    The client joins tokens that arrive together, which depends on how busy the process is.
    """
    if batch.finish not in (Finish.NONE, Finish.STOP, Finish.LENGTH):
        yield batch
        return
    num_single = max(0, len(batch.token_ids) - (batch.finish is Finish.STOP))
    for position in range(num_single):
        entries = None if batch.logprobs is None else batch.logprobs[position : position + 1]
        yield TokenBatch(batch.token_ids[position : position + 1], logprobs=entries)
    if batch.finish is not Finish.NONE:
        entries = None if batch.logprobs is None else batch.logprobs[num_single:]
        yield replace(batch, token_ids=batch.token_ids[num_single:], logprobs=entries)
