"""POST /v1/quote: when a chat or completion would start and finish, without running it."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.endpoints.prompts import encode_prompts, render_chat, truncated
from penstock.frontend.generation.answer_rules.chat_rules import AnswerRules, chat_answer_rules
from penstock.frontend.generation.answer_rules.requested_grammar import requested_grammar
from penstock.frontend.generation.failures import backend_unavailable, milliseconds, overloaded, stream_failure
from penstock.frontend.generation.models.model_table import answering_name, check_model
from penstock.frontend.generation.models.served_model import ServedModel
from penstock.frontend.generation.request_policy import RequestPolicy, read_request_policy
from penstock.frontend.generation.submission.submit import PreparedRequest, generation_requests, quote_terms
from penstock.frontend.schemas.answers import QuoteAnswer
from penstock.frontend.schemas.decoding import SMALL_BODY_BYTES, decode_chat, decode_completion
from penstock.frontend.transport.errors import ApiError, ErrorKind
from penstock.frontend.transport.exchange import Exchange
from penstock.shm.client import BackendUnavailable, Finish, Overloaded


async def answer_quote(request: PreparedRequest, policy: RequestPolicy, served: ServedModel) -> QuoteAnswer:
    """Return the quote of a request, which does not run. Raises ApiError."""
    backend = served.backend
    prompts, planned, _ = await generation_requests(request, policy, served)
    try:
        stream = backend.ask_quote(planned[0], quote_terms(request, planned))
    except Overloaded as error:
        raise overloaded(error.retry_after_s, error.limit) from None
    except BackendUnavailable:
        raise backend_unavailable(backend.retry_after_s) from None
    try:
        batch = await stream.result()
        if batch.finish is not Finish.QUOTED:
            raise stream_failure(batch, 0, None, backend.retry_after_s)
    finally:
        stream.cancel()
    quote = stream.quote
    if quote is None:
        raise ApiError(ErrorKind.INTERNAL, "the backend gave no quote")
    is_known = quote.first_token_s is not None and quote.finish_s is not None
    left_s = None if policy.deadline_s is None else policy.deadline_s - time.monotonic()
    return QuoteAnswer(
        model=answering_name(served.card, request.body.model),
        status="known" if is_known else "unknown",
        queue_position=quote.num_ahead,
        prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
        cached_tokens=quote.cached_tokens,
        coalesced=quote.is_coalesced,
        expected_completion_tokens=quote.expected_tokens,
        expected_ttft_ms=milliseconds(quote.first_token_s),
        expected_finish_ms=milliseconds(quote.finish_s),
        latest_finish_ms=milliseconds(quote.latest_finish_s),
        meets_deadline=None if left_s is None or quote.finish_s is None else quote.finish_s <= left_s,
    )


class _Fields(msgspec.Struct):
    """The fields that tell a chat from a completion."""

    messages: Any = None
    prompt: Any = None


_fields = msgspec.json.Decoder(_Fields)


async def quote(exchange: Exchange, context: EndpointContext) -> None:
    """POST /v1/quote. Raises ApiError, ClientGoneError."""
    fields = await context.read_ahead(exchange, _fields)
    request, served = await _prepare(exchange, context, fields)
    policy = read_request_policy(exchange, request.body)
    check_model(request.body.model, served.card)
    async with exchange.cancelled_on_disconnect():
        answer = await answer_quote(truncated(request, served.card), policy, served)
    await exchange.respond(200, msgspec.json.encode(answer))


async def _prepare(
    exchange: Exchange, context: EndpointContext, fields: _Fields
) -> tuple[PreparedRequest, ServedModel]:
    if fields.messages is not None:
        chat, served, num_body_bytes = await context.receive_body(exchange, decode_chat)
        async with exchange.cancelled_on_disconnect():
            prompt = await render_chat(chat, served, exchange.tenant, is_long=num_body_bytes > SMALL_BODY_BYTES)
            token_ids, rules = await chat_answer_rules(chat, prompt.token_ids, served)
        return PreparedRequest(chat, [token_ids], rules, prompt.pictures), served
    if fields.prompt is None:
        raise ApiError(ErrorKind.MISSING_FIELD, "messages: required, or prompt", param="messages")
    completion, served, _ = await context.receive_body(exchange, decode_completion)
    async with exchange.cancelled_on_disconnect():
        prompts = await encode_prompts(completion, served)
    return PreparedRequest(completion, prompts, AnswerRules(grammar=requested_grammar(completion))), served
