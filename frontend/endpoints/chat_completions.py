"""POST /v1/chat/completions: OpenAI's chat completions."""

from __future__ import annotations

from penstock.frontend.endpoints.answering import AnswerStyle, answer_chat
from penstock.frontend.endpoints.context import EndpointContext
from penstock.frontend.formats.chat import ChatFormat
from penstock.frontend.schemas.decoding import decode_chat
from penstock.frontend.transport.exchange import Exchange

_STYLE = AnswerStyle("chatcmpl-", ChatFormat)


async def create_chat_completion(exchange: Exchange, context: EndpointContext) -> None:
    """POST /v1/chat/completions. Raises ApiError, ClientGoneError."""
    body, served, num_body_bytes = await context.receive_body(exchange, decode_chat)
    await answer_chat(exchange, body, served, _STYLE, num_body_bytes=num_body_bytes)
