"""POST /v1/completions: OpenAI's older endpoint, which continues texts or token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.frontend.endpoints.answering import AnswerStyle, answer_prompts, refuse_if_full
from penstock.frontend.endpoints.prompts import encode_prompts
from penstock.frontend.formats.completion import CompletionFormat
from penstock.frontend.generation.answer_rules.chat_rules import AnswerRules
from penstock.frontend.generation.answer_rules.requested_grammar import requested_grammar
from penstock.frontend.generation.submission.submit import PreparedRequest
from penstock.frontend.schemas.decoding import decode_completion

if TYPE_CHECKING:
    from penstock.frontend.endpoints.context import EndpointContext
    from penstock.frontend.transport.exchange import Exchange

_STYLE = AnswerStyle("cmpl-", CompletionFormat)


async def create_completion(exchange: Exchange, context: EndpointContext) -> None:
    """POST /v1/completions. Raises ApiError, ClientGoneError."""
    body, served, _ = await context.receive_body(exchange, decode_completion)
    refuse_if_full(exchange, body, served)
    async with exchange.cancelled_on_disconnect():
        prompts = await encode_prompts(body, served)
    rules = AnswerRules(grammar=requested_grammar(body))
    await answer_prompts(exchange, PreparedRequest(body, prompts, rules), served, _STYLE)
