"""From a chat or from prompts to an answer in an endpoint's format. Every endpoint that generates ends here."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace

from penstock.frontend.endpoints.prompts import encode_prompts, fill_in_model, render_chat, truncated
from penstock.frontend.formats.base import Format, Identity, StreamUsageOptions, Usage
from penstock.frontend.generation.answer_rules.chat_rules import AnswerRules, chat_answer_rules
from penstock.frontend.generation.answer_rules.requested_grammar import requested_grammar
from penstock.frontend.generation.choices.answers import Settle, answer_stream, answer_whole
from penstock.frontend.generation.choices.choice_runner import ChoiceRunner
from penstock.frontend.generation.failures import expired, finish_reason_of
from penstock.frontend.generation.lingering import STREAM_HEADER, linger_terms, prepare_to_linger
from penstock.frontend.generation.models.capacity import check_capacity
from penstock.frontend.generation.models.model_table import answering_name, check_model
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.generation.request_policy import read_request_policy
from penstock.frontend.generation.submission.limits import limited_by_context
from penstock.frontend.generation.submission.sampling import is_deterministic
from penstock.frontend.generation.submission.submit import PreparedRequest, submit
from penstock.frontend.parsing.syntax.generic_tools import GENERIC
from penstock.frontend.schemas.chat import ChatBody
from penstock.frontend.schemas.completion import CompletionBody
from penstock.frontend.schemas.decoding import AnsweredBody
from penstock.frontend.schemas.generation import SchedulingBody
from penstock.frontend.telemetry.request_log import RequestLogEntry
from penstock.frontend.telemetry.trace_context import parse_traceparent
from penstock.frontend.transport.exchange import Exchange

MakeFormat = Callable[[Identity, Usage, StreamUsageOptions], Format]

_TOOLS_HEADER = b"x-penstock-tools"
_REQUEST_HEADER = b"x-penstock-request"
"""The number of the first choice in the flight recorder, where the engine view finds it."""
_INLINE_BODY_BYTES = 64 << 10
"""Chats from larger bodies are rendered in a thread."""


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """How an endpoint writes its answers."""

    id_prefix: str
    make_format: MakeFormat
    settle: Settle | None = None
    begun: tuple[str, int] | None = None
    """The id of an answer that another worker has begun, and when it began, in seconds since 1970."""
    farewell: bytes = b""
    """Ends a stream, after the format's last event."""
    stops_at_context: bool = False
    """An answer whose limit exceeds the context stops at the context's end. Otherwise such a limit is refused."""
    by_token: bool = False
    """Each token is its own piece, even when several arrive together: then a repetition has the same events."""


@contextlib.asynccontextmanager
async def prepared_in_time(exchange: Exchange, body: SchedulingBody) -> AsyncIterator[None]:
    """Run the block, which may read pictures, until the request's time limit, and while the client is there.

    Raises ApiError, ClientGoneError.
    """
    deadline_s = read_request_policy(exchange, body).deadline_s
    left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
    try:
        async with asyncio.timeout(left_s), exchange.cancelled_on_disconnect():
            yield
    except TimeoutError:
        raise expired() from None


async def answer_chat(
    exchange: Exchange,
    body: ChatBody,
    served: ServedModel,
    style: AnswerStyle,
    *,
    num_body_bytes: int,
    before: Sequence[int] = (),
) -> None:
    """Answer a chat, whichever endpoint's body it was made from. num_body_bytes is the size of that body; before are
    tokens that go before the chat's.

    Raises ApiError, ClientGoneError.
    """
    refuse_if_full(exchange, body, served)
    async with prepared_in_time(exchange, body):
        prompt = await render_chat(body, served, exchange.tenant, is_long=num_body_bytes > _INLINE_BODY_BYTES)
        token_ids, rules = await chat_answer_rules(body, prompt.token_ids, served)
    if body.offered_tools and served.syntax.is_generic:
        exchange.more_headers = (*exchange.more_headers, (_TOOLS_HEADER, GENERIC.encode()))
    pictures = tuple(picture.moved(len(before)) for picture in prompt.pictures)
    request = PreparedRequest(body, [[*before, *token_ids]], rules, pictures)
    await answer_prompts(exchange, request, served, style)


async def answer_completion(exchange: Exchange, body: CompletionBody, served: ServedModel, style: AnswerStyle) -> None:
    """Answer a completion, whichever endpoint's body it was made from. Raises ApiError, ClientGoneError."""
    refuse_if_full(exchange, body, served)
    async with exchange.cancelled_on_disconnect():
        prompts = await encode_prompts(body, served)
    if body.suffix:
        served, _ = fill_in_model(served, "suffix")
    rules = AnswerRules(grammar=requested_grammar(body))
    await answer_prompts(exchange, PreparedRequest(body, prompts, rules), served, style)


def refuse_if_full(exchange: Exchange, body: AnsweredBody, served: ServedModel) -> None:
    """Refuse a request that a full backend would refuse, before its prompts become tokens. Raises ApiError."""
    if exchange.lingering is not None and exchange.lingering.is_resumed:
        return
    policy = read_request_policy(exchange, body)
    check_capacity(served, policy, may_share=is_deterministic(body, served.card))


async def answer_prompts(exchange: Exchange, request: PreparedRequest, served: ServedModel, style: AnswerStyle) -> None:
    """Run the prompts and answer, as a stream or whole. Raises ApiError, ClientGoneError."""
    body, card, lingering = request.body, served.card, exchange.lingering
    begun = style.begun or (None if lingering is None else lingering.begun)
    response_id, created = begun or (served.new_id(style.id_prefix), int(time.time()))
    if lingering is not None:
        lingering.begun = (response_id, created)
        served = prepare_to_linger(lingering, body, served)
    backend = served.backend
    exchange.waits_for_backend = lambda: not backend.ready
    policy = read_request_policy(exchange, body)
    check_model(body.model, card)
    request = truncated(request, card)
    if style.stops_at_context:
        body = limited_by_context(body, max(map(len, request.prompts)), card)
        request = replace(request, body=body)
    usage = Usage(prompt_tokens=sum(map(len, request.prompts)))
    identity = Identity(response_id, created, answering_name(card, body.model), card.fingerprint or None)
    log_entry = _log_entry(exchange, identity, usage)
    answer = style.make_format(identity, usage, _stream_usage_options(body))
    linger = None
    if lingering is not None:
        linger = linger_terms(lingering, exchange.tenant)
        exchange.more_headers = (*exchange.more_headers, (STREAM_HEADER, response_id.encode()))
    try:
        choices = await submit(request, policy, served, exchange.claim, linger)
        number = (_REQUEST_HEADER, b"%d" % choices[0].stream.request_id)
        exchange.more_headers = (*exchange.more_headers, number)
        log_entry.max_tokens = max(choice.prompt.max_tokens for choice in choices)
        runner = ChoiceRunner(
            exchange,
            choices,
            usage,
            log_entry,
            backend,
            by_token=style.by_token or lingering is not None,
            call_ids=None if lingering is None else response_id,
        )
        if body.return_timings or body.timings_per_token:
            usage.timings = lambda: runner.timings().as_dict()
        if body.return_progress:
            usage.progress = runner.prompt_progress
        exchange.on_disconnect(runner.cancel)
        if not body.stream:
            await answer_whole(
                exchange, runner, answer, style.settle, num_best=(body.n or 1) if body.ranks_candidates else None
            )
        elif (error := await answer_stream(exchange, runner, answer, style.settle, style.farewell)) is not None:
            log_entry.finish_reason = finish_reason_of(error)
    except BaseException as error:
        log_entry.finish_reason = finish_reason_of(error)
        raise
    finally:
        log_entry.observe(backend.board, time.monotonic())


def _log_entry(exchange: Exchange, identity: Identity, usage: Usage) -> RequestLogEntry:
    return RequestLogEntry(
        identity.response_id,
        exchange.received_s,
        http_request_id=exchange.request_id,
        key=exchange.key_name,
        prompt_tokens=usage.prompt_tokens,
        model=identity.model,
        path=exchange.path,
        trace=parse_traceparent(exchange.header(b"traceparent")),
        report_spans=exchange.report_spans,
    )


def _stream_usage_options(body: AnsweredBody) -> StreamUsageOptions:
    options = body.stream_options
    in_every_chunk = body.timings_per_token is True
    if options is None:
        return StreamUsageOptions(timings_in_every_chunk=in_every_chunk)
    at_the_end = options.include_usage is True
    return StreamUsageOptions(at_the_end, at_the_end and options.continuous_usage_stats is True, in_every_chunk)
