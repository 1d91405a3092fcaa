"""POST /v1/messages, Anthropic's Messages API: the body is translated to a chat, the answer to a message."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.frontend.endpoints.answering import AnswerStyle, answer_chat
from penstock.frontend.endpoints.chat_translation import instructed, renamed, shared_fields
from penstock.frontend.endpoints.context import EndpointContext, run_sized
from penstock.frontend.endpoints.prompts import render_chat
from penstock.frontend.formats.base import Identity, StreamUsageOptions, Usage
from penstock.frontend.formats.messages import MessagesFormat
from penstock.frontend.schemas.chat import (
    ChatBody,
    ChatMessage,
    ChatTool,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    MessageToolCall,
    NamedFunction,
    NamedTool,
    Role,
    check_chat,
    content_of,
    picture_part,
)
from penstock.frontend.schemas.generation import JsonSchemaFormat, ResponseFormat
from penstock.frontend.schemas.messages import (
    AnthropicTool,
    ContentBlock,
    CountTokensBody,
    MessagesBody,
    ResultBlock,
    decode_count_tokens,
    decode_messages,
)
from penstock.frontend.transport.errors import invalid
from penstock.frontend.transport.exchange import Exchange

_RENAMED = (
    (re.compile(r"^max_completion_tokens$"), "max_tokens"),
    (re.compile(r"^stop$"), "stop_sequences"),
    (re.compile(r"^response_format\b(\.json_schema)?"), "output_config.format"),
    (re.compile(r"^(tools\[\d+\])\.function\.parameters\b"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\]|tool_choice)\.function\b"), r"\1"),
    (re.compile(r"^reasoning_effort$"), "output_config.effort"),
    (re.compile(r"^(thinking_budget|enable_thinking)$"), "thinking"),
    (re.compile(r"^continue_final_message$"), "messages"),
)
"""This endpoint's names for a chat request's fields."""

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


async def create_message(exchange: Exchange, context: EndpointContext) -> None:
    """POST /v1/messages. Raises ApiError, ClientGoneError."""
    body, served, num_body_bytes = await context.receive_body(exchange, decode_messages)
    with renamed(_RENAMED):
        async with exchange.cancelled_on_disconnect():
            chat = await run_sized(num_body_bytes, checked_chat, body)

        def make_format(identity: Identity, usage: Usage, _: StreamUsageOptions) -> MessagesFormat:
            return MessagesFormat(identity, usage, exchange.request_id, served.card.max_context_tokens)

        style = AnswerStyle("msg_", make_format, stops_at_context=True)
        await answer_chat(exchange, chat, served, style, num_body_bytes=num_body_bytes)


async def count_tokens(exchange: Exchange, context: EndpointContext) -> None:
    """POST /v1/messages/count_tokens: the tokens of the prompt that the same message makes. Raises ApiError,
    ClientGoneError."""
    body, served, num_body_bytes = await context.receive(
        exchange, decode_count_tokens, model_of=lambda body: body.model
    )
    async with exchange.cancelled_on_disconnect():
        with renamed(_RENAMED):
            chat = await run_sized(num_body_bytes, checked_chat, body)
            prompt = await render_chat(chat, served, exchange.tenant, is_long=True)
        await exchange.respond(200, msgspec.json.encode({"input_tokens": len(prompt.token_ids)}))


def checked_chat(body: CountTokensBody) -> ChatBody:
    """Return the same request as a valid chat. Raises ApiError."""
    chat = as_chat(body)
    check_chat(chat)
    return chat


def as_chat(body: CountTokensBody) -> ChatBody:
    """Return the same request as a chat. If the last message is the assistant's, the answer continues it. Raises
    ApiError."""
    messages = _named(
        [
            chat
            for position, message in enumerate(body.messages)
            for chat in _messages(f"messages[{position}].content", message.role, message.content)
        ]
    )
    if body.system:
        messages = instructed(_joined(body.system), messages)
    if not messages:
        invalid("messages", "all of them are empty; at least one needs content")
    choice = body.tool_choice
    output = body.output_config
    thinking = body.thinking
    limits: dict[str, Any] = {}
    if isinstance(body, MessagesBody):
        limits = {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences or None}
    return ChatBody(
        **shared_fields(body) | limits,
        messages=messages,
        tools=_tools(body.tools),
        tool_choice=None if choice is None else _choice(choice.type, choice.name),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=_response_format(body),
        reasoning_effort=None if output is None else output.effort,
        # Thinking is off unless requested, as at Anthropic. Models without a switch think anyway.
        enable_thinking=thinking is not None and thinking.type != "disabled",
        thinking_budget=None if thinking is None else thinking.budget_tokens,
        chat_template_kwargs=body.chat_template_kwargs,
        continue_final_message=messages[-1].role == "assistant" or None,
    )


def _messages(path: str, role: Role, content: str | Sequence[ContentBlock]) -> list[ChatMessage]:
    """Return one of Anthropic's messages as chat messages: several, if it contains tool results. The user sends the
    pictures of these: few templates show any of a tool."""
    if isinstance(content, str):
        return [ChatMessage(role, content)]
    if role == "assistant":
        return _assistant(content)
    messages: list[ChatMessage] = []
    parts: list[ContentPart] = []
    for index, block in enumerate(content):
        where = f"{path}[{index}]"
        if block.type == "tool_result":
            if any(not part.is_picture for part in parts):
                messages.append(ChatMessage(role, content_of(parts)))
                parts = []
            messages.append(ChatMessage("tool", _joined(block.content or ""), tool_call_id=block.tool_use_id))
            shown = block.content if isinstance(block.content, list) else ()
            parts += [_part(f"{where}.content[{place}]", each) for place, each in enumerate(shown) if each.source]
        else:
            parts.append(_part(where, block))
    return [*messages, ChatMessage(role, content_of(parts))] if parts else messages


def _part(path: str, block: ContentBlock | ResultBlock) -> ContentPart:
    if block.source is not None:
        return picture_part(block.source.data_uri, f"{path}.source")
    return ContentPart("text", block.text or "")


def _assistant(content: Sequence[ContentBlock]) -> list[ChatMessage]:
    """Redacted thinking is skipped: its text is unknown."""
    texts = [block.text or "" for block in content if block.type == "text"]
    calls = [
        MessageToolCall(block.id or "", FunctionCall(block.name or "", msgspec.json.encode(block.input).decode()))
        for block in content
        if block.type == "tool_use"
    ]
    thoughts = [block.thinking or "" for block in content if block.type == "thinking"]
    if not (texts or calls or thoughts):
        return []
    text = "\n".join(texts) if texts else None
    return [ChatMessage("assistant", text, tool_calls=calls or None, reasoning_content="\n".join(thoughts) or None)]


def _named(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Add the tool's name to tool results. Some templates need it."""
    names = {call.id: call.function.name for message in messages for call in message.tool_calls or ()}
    return [
        msgspec.structs.replace(message, name=names.get(message.tool_call_id or ""))
        if message.role == "tool"
        else message
        for message in messages
    ]


def _joined(content: str | Sequence[ContentBlock] | Sequence[ResultBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text or "" for block in content if not block.source)


def _tools(tools: Sequence[AnthropicTool] | None) -> list[ChatTool] | None:
    if not tools:
        return None
    return [ChatTool(FunctionDefinition(tool.name, tool.description, tool.input_schema, tool.strict)) for tool in tools]


def _choice(kind: str, name: str | None) -> Any:
    return NamedTool(NamedFunction(name or "")) if kind == "tool" else _CHOICES[kind]


def _response_format(body: CountTokensBody) -> ResponseFormat | None:
    form = body.output_format or (None if body.output_config is None else body.output_config.format)
    return None if form is None else ResponseFormat("json_schema", JsonSchemaFormat(schema=form.schema, strict=True))
