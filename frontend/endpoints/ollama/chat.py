"""POST /api/chat."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from penstock.frontend.endpoints.answering import answer_chat
from penstock.frontend.endpoints.context import run_sized
from penstock.frontend.endpoints.ollama.requests import (
    answer_empty,
    receive,
    shared_fields,
    style_of,
    think_fields,
    with_own_names,
)
from penstock.frontend.schemas.chat import ChatBody, ChatMessage, FunctionCall, MessageToolCall, check_chat
from penstock.frontend.schemas.ollama import decode_ollama_chat

if TYPE_CHECKING:
    from typing import Any

    from penstock.frontend.endpoints.context import EndpointContext
    from penstock.frontend.schemas.ollama import OllamaChatBody, OllamaMessage
    from penstock.frontend.transport.exchange import Exchange


async def chat(exchange: Exchange, context: EndpointContext) -> None:
    """POST /api/chat. Raises ApiError, ClientGoneError."""
    received = await receive(exchange, context, decode_ollama_chat, "generate", lambda body: not body.messages)
    body = received.body
    if not body.messages:
        await answer_empty(exchange, body, is_chat=True)
        return
    with with_own_names():
        async with exchange.cancelled_on_disconnect():
            translated = await run_sized(received.num_bytes, _checked, body, think_fields(body, received.served))
        style = style_of(received, is_chat=True)
        await answer_chat(exchange, translated, received.served, style, num_body_bytes=received.num_bytes)


def _checked(body: OllamaChatBody, thinking: dict[str, Any]) -> ChatBody:
    """Return the same request as a valid chat. Raises ApiError."""
    chat = ChatBody(
        messages=_messages(body.messages or []),
        tools=body.tools or None,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        **shared_fields(body) | thinking,
    )
    check_chat(chat)
    return chat


def _messages(given: list[OllamaMessage]) -> list[ChatMessage]:
    """Return the chat's messages. Calls without ids get some, and results those of the calls that they answer."""
    messages: list[ChatMessage] = []
    open_calls: deque[MessageToolCall] = deque()
    num_calls = 0
    for message in given:
        content = message.content or ""
        if message.role == "tool":
            found = _answered(message, open_calls)
            call_id = message.tool_call_id or ("" if found is None else found.id)
            name = message.tool_name or (None if found is None else found.function.name)
            messages.append(ChatMessage("tool", content, name=name, tool_call_id=call_id))
            continue
        calls = []
        for call in message.tool_calls or ():
            arguments = msgspec.json.encode(call.function.arguments).decode()
            # Mistral's templates take ids of nine letters and digits.
            calls.append(MessageToolCall(call.id or f"call{num_calls:05}", FunctionCall(call.function.name, arguments)))
            num_calls += 1
        open_calls.extend(calls)
        role = message.role
        messages.append(
            ChatMessage(role, content, tool_calls=calls or None, reasoning_content=message.thinking)  # type: ignore[arg-type]  # checked before
        )
    return messages


def _answered(result: OllamaMessage, open_calls: deque[MessageToolCall]) -> MessageToolCall | None:
    """Take the call that the result names by id or by function, else the oldest one."""
    named = (call for call in open_calls if result.tool_call_id == call.id)
    alike = (call for call in open_calls if result.tool_name in (None, "", call.function.name))
    found = next(named, None) or next(alike, None)
    if found is not None:
        open_calls.remove(found)
    return found
