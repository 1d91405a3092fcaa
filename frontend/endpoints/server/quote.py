"""POST /v1/quote: when a chat or completion would start and finish, without running it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.frontend.endpoints.context import run_sized
from penstock.frontend.endpoints.prompts import encode_prompts, render_chat, truncated
from penstock.frontend.generation.answer_rules.chat_rules import chat_answer_rules
from penstock.frontend.generation.answer_rules.requested_grammar import requested_grammar
from penstock.frontend.generation.answer_rules.rules import AnswerRules
from penstock.frontend.generation.models.model_table import check_model
from penstock.frontend.generation.quotes import answer_quote
from penstock.frontend.generation.request_policy import read_request_policy
from penstock.frontend.generation.submission.submit import PreparedRequest
from penstock.frontend.schemas.body_structure import SMALL_BODY_BYTES
from penstock.frontend.schemas.decoding import decode_body, decode_chat, decode_completion
from penstock.frontend.transport.errors import ApiError, ErrorKind

if TYPE_CHECKING:
    from penstock.frontend.endpoints.context import EndpointContext
    from penstock.frontend.generation.models.served_model import ServedModel
    from penstock.frontend.transport.exchange import Exchange


class _Fields(msgspec.Struct):
    """The fields that tell a chat from a completion."""

    messages: Any = None
    prompt: Any = None


_fields = msgspec.json.Decoder(_Fields)


async def quote(exchange: Exchange, context: EndpointContext) -> None:
    """POST /v1/quote. Raises ApiError, ClientGoneError."""
    data = await context.read_ahead(exchange)
    async with exchange.cancelled_on_disconnect():
        fields = await run_sized(len(data), decode_body, _fields, data)
    request, served = await _prepare(exchange, context, fields)
    policy = read_request_policy(exchange, request.body)
    check_model(request.body.model, served.card)
    prompts = [truncated(request.body, prompt, served.card) for prompt in request.prompts]
    async with exchange.cancelled_on_disconnect():
        answer = await answer_quote(replace(request, prompts=prompts), policy, served)
    await exchange.respond(200, msgspec.json.encode(answer))


async def _prepare(
    exchange: Exchange, context: EndpointContext, fields: _Fields
) -> tuple[PreparedRequest, ServedModel]:
    if fields.messages is not None:
        chat, served, num_body_bytes = await context.receive_body(exchange, decode_chat)
        async with exchange.cancelled_on_disconnect():
            prompt = await render_chat(chat, served, is_long=num_body_bytes > SMALL_BODY_BYTES)
            prompt, rules = await chat_answer_rules(chat, prompt, served)
        return PreparedRequest(chat, [prompt], rules), served
    if fields.prompt is None:
        raise ApiError(ErrorKind.MISSING_FIELD, "messages: required, or prompt", param="messages")
    completion, served, _ = await context.receive_body(exchange, decode_completion)
    async with exchange.cancelled_on_disconnect():
        prompts = await encode_prompts(completion, served)
    return PreparedRequest(completion, prompts, AnswerRules(grammar=requested_grammar(completion))), served
