"""POST /api/chat."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Any

import msgspec

from penstock.frontend.endpoints.answering import answer_chat
from penstock.frontend.endpoints.context import EndpointContext, run_sized
from penstock.frontend.endpoints.ollama.requests import (
    answers_empty,
    picture_parts,
    receive,
    shared_fields,
    style_of,
    think_fields,
    with_own_names,
)
from penstock.frontend.schemas.chat import (
    ChatBody,
    ChatMessage,
    ContentPart,
    FunctionCall,
    MessageToolCall,
    check_chat,
    content_of,
)
from penstock.frontend.schemas.ollama import OllamaChatBody, OllamaMessage, decode_ollama_chat
from penstock.frontend.transport.exchange import Exchange

_ALL = ("all", "")


async def chat(exchange: Exchange, context: EndpointContext) -> None:
    """POST /api/chat. Raises ApiError, ClientGoneError."""
    answer_empty = answers_empty(exchange, is_chat=True)
    received = await receive(
        exchange, context, decode_ollama_chat, "generate", lambda body: not body.messages, answer_empty
    )
    if received is None:
        return
    body = received.body
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
    open_calls = _OpenCalls()
    num_calls = 0
    for position, message in enumerate(given):
        content = message.content or ""
        pictures = picture_parts(message.images, f"messages[{position}].images")
        if message.role == "tool":
            found = open_calls.take(message)
            call_id = message.tool_call_id or ("" if found is None else found.id)
            name = message.tool_name or (None if found is None else found.function.name)
            messages.append(ChatMessage("tool", content, name=name, tool_call_id=call_id))
            if pictures:  # few templates show any of a tool
                messages.append(ChatMessage("user", pictures))
            continue
        calls = []
        for call in message.tool_calls or ():
            arguments = msgspec.json.encode(call.function.arguments).decode()
            # Mistral's templates take ids of nine letters and digits.
            calls.append(MessageToolCall(call.id or f"call{num_calls:05}", FunctionCall(call.function.name, arguments)))
            num_calls += 1
        open_calls.add(calls)
        role = message.role
        messages.append(
            ChatMessage(
                role,  # type: ignore[arg-type]  # checked before
                content_of([*pictures, ContentPart("text", content)]),
                tool_calls=calls or None,
                reasoning_content=message.thinking,
            )
        )
    return messages


class _OpenCalls:
    """Calls without a result, found without a search of them all: a chat may have thousands."""

    def __init__(self) -> None:
        self._queues: defaultdict[tuple[str, str], deque[tuple[int, MessageToolCall]]] = defaultdict(deque)
        """Calls with their numbers, oldest first: by id, by name, and all."""
        self._taken: set[int] = set()
        self._num_calls = 0

    def add(self, calls: Iterable[MessageToolCall]) -> None:
        for call in calls:
            for key in (("id", call.id), ("name", call.function.name), _ALL):
                self._queues[key].append((self._num_calls, call))
            self._num_calls += 1

    def take(self, result: OllamaMessage) -> MessageToolCall | None:
        """Take the call that the result names by id or by function, else the oldest one."""
        by_id = None if result.tool_call_id is None else self._first(("id", result.tool_call_id))
        found = by_id or self._first(("name", result.tool_name) if result.tool_name else _ALL)
        if found is None:
            return None
        self._taken.add(found[0])
        return found[1]

    def _first(self, key: tuple[str, str]) -> tuple[int, MessageToolCall] | None:
        queue = self._queues[key]
        while queue and queue[0][0] in self._taken:
            queue.popleft()
        return queue[0] if queue else None
