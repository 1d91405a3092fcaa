"""Translates the Responses API's items and tools to a chat's messages and functions, and back.

Drops the oldest turns of a chat that is too long.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.frontend.endpoints.chat_translation import instructed, shared_fields
from penstock.frontend.endpoints.prompts import render_chat
from penstock.frontend.formats.compaction import summary_in
from penstock.frontend.formats.responses import CalledTool, custom_arguments
from penstock.frontend.generation.models.served_model import ServedModel
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
    content_of,
    picture_part,
)
from penstock.frontend.schemas.generation import JsonSchemaFormat, ResponseFormat
from penstock.frontend.schemas.response_tools import CallableTool, NamedToolChoice, callable_tools, qualified
from penstock.frontend.schemas.responses import MAX_ITEMS, ItemPart, ResponseItem, ResponsesBody
from penstock.frontend.transport.errors import ApiError, ErrorKind, invalid, shorten


def chat_tools(body: ResponsesBody) -> tuple[list[ChatTool] | None, Any]:
    """Return the tools that may be called, and the choice among them. Raises ApiError."""
    tools = [_as_function(tool, namespace) for _, namespace, tool in callable_tools(body.tools)]
    choice = body.tool_choice
    if not isinstance(choice, NamedToolChoice):
        if choice == "required" and body.tools and not tools:
            message = "tool_choice: requires a call, but this server carries out none of these tools"
            raise ApiError(ErrorKind.UNSUPPORTED_FIELD, message, param="tool_choice")
        return tools or None, choice
    if choice.tools is None:
        return tools or None, NamedTool(NamedFunction(qualified(choice.name or "", choice.namespace)))
    allowed = {qualified(tool.name or "", tool.namespace) for tool in choice.tools}
    return [tool for tool in tools if tool.function.name in allowed] or None, choice.mode


def forces_call(body: ResponsesBody) -> bool:
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        return choice.tools is None or choice.mode == "required"
    return choice == "required"


def called_tools(body: ResponsesBody) -> dict[str, CalledTool]:
    """Return this API's description of each tool's call, by the name that the model knows. Plain functions are left
    out."""
    return {
        qualified(tool.name or "", namespace): CalledTool(tool.name or "", namespace, is_custom=tool.type == "custom")
        for _, namespace, tool in callable_tools(body.tools)
        if namespace is not None or tool.type == "custom"
    }


def _as_function(tool: CallableTool, namespace: str | None) -> ChatTool:
    name = qualified(tool.name or "", namespace)
    if tool.type == "function":
        return ChatTool(FunctionDefinition(name, tool.description, tool.parameters, tool.strict))
    text: dict[str, Any] = {"type": "string"}
    description, strict = tool.description or "", None
    form = tool.format
    if form is not None and form.type == "grammar":
        if form.syntax == "regex":
            text["pattern"], strict = f"^(?:{form.definition})$", True
        # A grammar's rules cannot be enforced within a JSON string; the model reads them.
        description = f"{description}\n\nThe input must match this {form.syntax} grammar:\n{form.definition}".lstrip()
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return ChatTool(FunctionDefinition(name, description, parameters, strict))


RENAMED = (
    (re.compile(r"^(max_completion_tokens|max_tokens)$"), "max_output_tokens"),
    (re.compile(r"^messages\b.*"), "input"),
    (re.compile(r"^response_format\.json_schema\b"), "text.format"),
    (re.compile(r"^response_format\b"), "text.format"),
    (re.compile(r"^(tools\[\d+\]|tool_choice)\.function\b"), r"\1"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
)
"""This endpoint's names for a chat request's fields."""


_CALLS = ("function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")


def as_chat(body: ResponsesBody, history: Sequence[ChatMessage]) -> ChatBody:
    """Return the same request as a chat, after the conversation that it continues. Raises ApiError."""
    messages = [*history, *to_messages(input_items(body))]
    if body.instructions:
        messages = instructed(body.instructions, messages)
    if not messages:
        invalid("input", "empty; at least one item is needed")
    if len(messages) > MAX_ITEMS:
        invalid("input", f"{len(messages)} messages including the conversation before; the limit is {MAX_ITEMS}")
    _check_results(messages)
    tools, choice = chat_tools(body)
    return ChatBody(
        **shared_fields(body),
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.requests_logprobs or None,
        top_logprobs=body.top_logprobs,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_response_format(body),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        enable_thinking=body.enable_thinking,
        thinking_budget=body.thinking_budget,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _check_results(messages: Sequence[ChatMessage]) -> None:
    """Refuse the result of a call that the conversation does not have, as OpenAI does. Raises ApiError."""
    calls: set[str] = set()
    for message in messages:
        calls.update(call.id for call in message.tool_calls or ())
        if message.role == "tool" and message.tool_call_id not in calls:
            invalid("input", f"no call in the conversation has the call_id {shorten(message.tool_call_id)} of a result")


def input_items(body: ResponsesBody) -> list[ResponseItem]:
    if body.input is None:
        return []
    return [ResponseItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


class _Turn:
    """One message of the assistant, collected from its items."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.texts: list[str] = []
        self.calls: list[MessageToolCall] = []

    @property
    def is_begun(self) -> bool:
        return bool(self.reasoning or self.texts or self.calls)

    def message(self) -> ChatMessage:
        return ChatMessage(
            "assistant",
            content="\n".join(self.texts) if self.texts else None,
            tool_calls=self.calls or None,
            reasoning_content="\n".join(self.reasoning) or None,
        )


def to_messages(items: Sequence[ResponseItem]) -> list[ChatMessage]:
    """Return the items as chat messages. Consecutive reasoning, text and calls become one message of the assistant."""
    messages: list[ChatMessage] = []
    turn = _Turn()
    names: dict[str | None, str | None] = {}
    shown: list[ContentPart] = []
    """Pictures among the results of calls. The user sends them: few templates show any of a tool."""

    def show() -> None:
        nonlocal shown
        if shown:
            messages.append(ChatMessage("user", shown))
            shown = []

    def end_turn() -> None:
        nonlocal turn
        if turn.is_begun:
            messages.append(turn.message())
            turn = _Turn()

    for position, item in enumerate(items):
        if item.kind not in _RESULTS:
            show()
        if item.kind == "reasoning":
            if turn.texts or turn.calls:
                end_turn()
            if thought := joined(item.content) or joined(item.summary):
                turn.reasoning.append(thought)
        elif item.kind in _CALLS:
            name = names[item.call_id] = qualified(item.name or "", item.namespace)
            is_custom = item.kind == "custom_tool_call"
            arguments = custom_arguments(item.input or "") if is_custom else item.arguments or ""
            turn.calls.append(MessageToolCall(item.call_id or "", FunctionCall(name, arguments)))
        elif item.kind in _RESULTS:
            end_turn()
            messages.append(
                ChatMessage("tool", joined(item.output), name=names.get(item.call_id), tool_call_id=item.call_id)
            )
            shown += [part for part in _parts(f"input[{position}].output", item.output) if part.is_picture]
        elif item.kind == "compaction":
            end_turn()
            messages.append(ChatMessage("user", summary_in(item.encrypted_content or "")))
        elif item.role == "assistant":
            if turn.texts or turn.calls:
                end_turn()
            turn.texts.append(joined(item.content))
        else:
            end_turn()
            messages.append(
                ChatMessage(item.role or "user", content_of(_parts(f"input[{position}].content", item.content)))
            )
    end_turn()
    show()
    return messages


def _parts(path: str, content: str | Sequence[ItemPart] | None) -> list[ContentPart]:
    if isinstance(content, str):
        return [ContentPart("text", content)]
    return [
        picture_part(part.image_url or "", f"{path}[{index}].image_url")
        if part.is_picture
        else ContentPart("text", part.text_or_refusal)
        for index, part in enumerate(content or ())
    ]


def joined(content: str | Sequence[ItemPart] | None) -> str:
    """Return the text of a content."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text_or_refusal for part in content or () if not part.is_picture)


def listed(item: ResponseItem, item_id: str) -> dict[str, Any]:
    """Return an input item as the API lists it."""
    common: dict[str, Any] = {"id": item.id or item_id, "type": item.kind, "status": "completed"}
    match item.kind:
        case "message":
            kind = "output_text" if item.role == "assistant" else "input_text"
            extra: dict[str, Any] = {"annotations": []} if item.role == "assistant" else {}
            parts = [ItemPart(kind, item.content)] if isinstance(item.content, str) else item.content or ()
            content = [
                {"type": part.type, "image_url": part.image_url, "detail": part.detail or "auto"}
                if part.is_picture
                else {"type": kind, "text": part.text_or_refusal, **extra}
                for part in parts
            ]
            return common | {"role": item.role, "content": content}
        case "function_call":
            return common | {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        case "custom_tool_call":
            return common | {"call_id": item.call_id, "name": item.name, "input": item.input}
        case "function_call_output" | "custom_tool_call_output":
            return common | {"call_id": item.call_id, "output": joined(item.output)}
        case "compaction":
            return common | {"encrypted_content": item.encrypted_content}
        case _:
            summary = [{"type": "summary_text", "text": part.text_or_refusal} for part in item.summary or ()]
            content = [{"type": "reasoning_text", "text": joined(item.content)}] if item.content else []
            return common | {"summary": summary, "content": content}


def _response_format(body: ResponsesBody) -> ResponseFormat | None:
    form = None if body.text is None else body.text.format
    if form is None or forces_call(body):  # a call has no text
        return None
    schema = JsonSchemaFormat(form.name, form.description, form.schema, form.strict)
    return ResponseFormat(form.type, schema if form.type == "json_schema" else None)


async def fitted(body: ChatBody, served: ServedModel, tenant: bytes) -> ChatBody:
    """Return the chat with as many of its last turns as leave space for the answer, and at least one turn.

    Instructions stay. A turn begins with a user message, so that no call is separated from its result; one behind a
    result has the result's pictures. Raises ApiError.
    """
    num_fixed = 1 if body.messages[0].role in ("system", "developer") else 0
    rest = body.messages[num_fixed:]
    roles = [message.role for message in rest]
    cuts = [0, *(n for n in range(1, len(rest)) if roles[n] == "user" and roles[n - 1] != "tool")]
    max_prompt_tokens = served.card.max_context_tokens - (body.max_completion_tokens or 1)

    def without(num_dropped: int) -> ChatBody:
        return msgspec.structs.replace(body, messages=body.messages[:num_fixed] + rest[num_dropped:])

    async def fits(num_dropped: int) -> bool:
        try:
            prompt = await render_chat(without(num_dropped), served, tenant, is_long=True)
            return len(prompt.token_ids) <= max_prompt_tokens
        except ApiError as error:
            if error.kind is ErrorKind.CONTEXT_TOO_LONG:
                return False
            raise

    if await fits(0):
        return body
    low, high = 1, len(cuts)
    while low < high:
        middle = (low + high) // 2
        if await fits(cuts[middle]):
            high = middle
        else:
            low = middle + 1
    return without(cuts[min(low, len(cuts) - 1)])
