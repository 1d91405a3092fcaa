"""Answers one request in its endpoint's format, whole or as a stream, while its choices run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from penstock.frontend.formats.base import Format
from penstock.frontend.generation.choices.choice import Choice
from penstock.frontend.generation.choices.choice_runner import ChoiceRunner
from penstock.frontend.parsing.blocks import ChoiceOutput
from penstock.frontend.parsing.deltas import Delta
from penstock.frontend.transport.disconnect import ClientGoneError
from penstock.frontend.transport.errors import ApiError
from penstock.frontend.transport.exchange import Exchange
from penstock.frontend.transport.sse import EventNumbers, EventStream

Settle = Callable[[bytes], Awaitable[None]]
"""Awaited with the last part of an answer, before the client can see it."""

_INLINE_LOGPROBS = 64
"""Tokens with log probabilities per piece; more, such as those of a prompt, are formatted in a thread."""


async def answer_whole(
    exchange: Exchange,
    runner: ChoiceRunner,
    answer_format: Format,
    settle: Settle | None = None,
    num_best: int | None = None,
) -> None:
    """Answer with all choices, or for each prompt with the num_best choices whose tokens are the likeliest on average.

    Raises ApiError, ClientGoneError.
    """
    outputs = {choice.index: ChoiceOutput() for choice in runner.choices}

    async def collect(choice: Choice, delta: Delta) -> None:
        outputs[choice.index].add(delta)

    await runner.run(collect)
    kept = runner.choices if num_best is None else _likeliest(runner.choices, num_best)

    def write() -> bytes:
        for choice in kept:
            choice.complete(outputs[choice.index])
        return answer_format.whole([outputs[choice.index] for choice in kept])

    # The prompt may have hundreds of thousands of log probabilities, and so may all choices together.
    num_logprobs = sum(len(outputs[choice.index].logprobs) for choice in kept)
    is_long = kept[0].reports_prompt_logprobs or num_logprobs > _INLINE_LOGPROBS
    whole = await asyncio.to_thread(write) if is_long else write()
    if settle is not None:
        await settle(whole)
    await exchange.respond(200, whole, runner.headers(is_whole=True))


async def answer_stream(
    exchange: Exchange,
    runner: ChoiceRunner,
    answer_format: Format,
    settle: Settle | None = None,
    farewell: bytes = b"",
) -> ApiError | None:
    """Answer with a stream of events. Return the error that ended it, if any: then it is the last event.

    Raises ApiError before the first event, ClientGoneError.
    """
    lingering = exchange.lingering
    events = EventStream(exchange, runner.headers, None if lingering is None else EventNumbers(lingering.num_received))
    opened: set[int] = set()
    # The choices of one request mostly receive their tokens in the same turn of the event loop.
    send = events.write if len(runner.choices) == 1 else events.write_together

    async def write(choice: Choice, delta: Delta) -> None:
        event = b""
        if choice.index not in opened:
            opened.add(choice.index)
            event = answer_format.opening(choice.index, choice.reported_prompt)
            if delta.has_progress:  # the opening says it
                delta = Delta()
        if choice.finish_reason is None:
            format_it = partial(answer_format.delta, choice.index, delta)
        elif delta:
            format_it = partial(answer_format.last, choice.index, delta, choice.finish_reason, choice.stopped_by)
        else:
            format_it = partial(answer_format.closing, choice.index, choice.finish_reason, choice.stopped_by)
        if len(delta.logprobs) > _INLINE_LOGPROBS:
            event += await asyncio.to_thread(format_it)
        elif delta or choice.finish_reason is not None:
            event += format_it()
        if event:
            await send(event)

    failure: ApiError | None = None
    try:
        await runner.run(write, answer_format.delta)
    except ApiError as error:
        if not exchange.started:
            raise
        failure = error
    except ClientGoneError:
        raise
    except Exception as error:
        if not exchange.started or error is exchange.ending:
            raise
        failure = exchange.unforeseen()
    last = answer_format.end() if failure is None else answer_format.failure(failure)
    if settle is not None:
        await settle(last)
    await events.end(last + farewell, is_failure=failure is not None)
    return failure


def _likeliest(choices: list[Choice], num_best: int) -> list[Choice]:
    """Return the num_best choices of each prompt, by log probability per token, the best first."""
    kept: list[Choice] = []
    for prompt_index in dict.fromkeys(choice.prompt.index for choice in choices):
        candidates = [choice for choice in choices if choice.prompt.index == prompt_index]
        candidates.sort(key=lambda choice: choice.sum_logprob / max(1, choice.num_tokens), reverse=True)
        kept += candidates[:num_best]
    return kept
