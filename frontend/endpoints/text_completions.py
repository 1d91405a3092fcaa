"""POST /v1/completions: OpenAI's older endpoint, which continues texts or token ids."""

from __future__ import annotations

from penstock.frontend.endpoints.answering import AnswerStyle, answer_completion
from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.formats.completion import CompletionFormat
from penstock.frontend.schemas.decoding import decode_completion
from penstock.frontend.transport.exchange import Exchange

_STYLE = AnswerStyle("cmpl-", CompletionFormat)


async def create_completion(exchange: Exchange, context: EndpointContext) -> None:
    """POST /v1/completions. Raises ApiError, ClientGoneError."""
    body, served, _ = await context.receive_body(exchange, decode_completion)
    await answer_completion(exchange, body, served, _STYLE)
