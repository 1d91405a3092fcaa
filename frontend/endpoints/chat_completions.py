"""POST /v1/chat/completions: OpenAI's chat completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.frontend.endpoints.answering import AnswerStyle, answer_chat
from penstock.frontend.formats.chat import ChatFormat
from penstock.frontend.schemas.chat import ChatBody
from penstock.frontend.schemas.decoding import decode_chat

if TYPE_CHECKING:
    from penstock.frontend.endpoints.context import EndpointContext
    from penstock.frontend.transport.exchange import Exchange

_STYLE = AnswerStyle("chatcmpl-", ChatFormat)


async def create_chat_completion(exchange: Exchange, context: EndpointContext) -> None:
    """POST /v1/chat/completions. Raises ApiError, ClientGoneError."""
    data, served = await context.receive(exchange, ChatBody)
    body = decode_chat(data)
    await answer_chat(exchange, body, served, context.backend, _STYLE, num_body_bytes=len(data))
