"""Writes the messages of a conversation as JSON, and reads them. They were checked before they were written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import msgspec
from msgspec import Struct

from penstock.frontend.schemas.chat import (
    PICTURE,
    ChatMessage,
    ContentPart,
    FunctionCall,
    MessageToolCall,
    picture_part,
)

NO_MESSAGES = b"[]"


class _Message(Struct, array_like=True):
    """A chat message without its type's bounds: a model's call need not respect them."""

    role: str
    content: str | list[tuple[str, str]] | None
    """A text; or the types of parts, with their texts and URLs of pictures."""
    name: str | None
    tool_call_id: str | None
    tool_calls: list[tuple[str, str, str]] | None
    reasoning_content: str | None


_decoder = msgspec.json.Decoder(list[_Message])


def add_messages(data: bytes, messages: Iterable[ChatMessage]) -> bytes:
    """Return the encoded conversation with these messages at its end."""
    added = msgspec.json.encode([_stored(message) for message in messages])
    if NO_MESSAGES in (data, added):
        return data if added == NO_MESSAGES else added
    return b"%b,%b" % (data[:-1], added[1:])


def decode_messages(data: bytes) -> tuple[ChatMessage, ...]:
    return tuple(map(_restored, _decoder.decode(data)))


def _stored(message: ChatMessage) -> _Message:
    calls, content = message.tool_calls, message.content
    return _Message(
        message.role,
        [(part.type, part.picture_url if part.is_picture else part.text or "") for part in content]
        if isinstance(content, list)
        else content,
        message.name,
        message.tool_call_id,
        None if calls is None else [(call.id, call.function.name, call.function.arguments) for call in calls],
        message.reasoning_content,
    )


def _restored(message: _Message) -> ChatMessage:
    calls, content = message.tool_calls, message.content
    return ChatMessage(
        cast("Any", message.role),
        [_part(kind, value) for kind, value in content] if isinstance(content, list) else content,
        message.name,
        message.tool_call_id,
        None if calls is None else [MessageToolCall(call, FunctionCall(name, text)) for call, name, text in calls],
        message.reasoning_content,
    )


def _part(kind: str, value: str) -> ContentPart:
    return picture_part(value, "previous_response_id") if kind == PICTURE else ContentPart(kind, value)
