"""A Responses request in progress: makes its answer's format and its stored form."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from penstock.frontend.endpoints.responses.items import called_tools, input_items, to_messages
from penstock.frontend.endpoints.responses.storage.store import StoredResponse
from penstock.frontend.endpoints.responses.storage.stored_messages import NO_MESSAGES, add_messages
from penstock.frontend.formats.base import Identity, StreamUsageOptions, Usage
from penstock.frontend.formats.responses import ResponsesFormat
from penstock.frontend.generation.models.model_table import answering_name
from penstock.frontend.parsing.blocks import BlockKind
from penstock.frontend.schemas.chat import ChatMessage, FunctionCall, MessageToolCall
from penstock.frontend.schemas.response_tools import CallableTool, NamedToolChoice, ResponseTool
from penstock.frontend.schemas.responses import ResponseItem, ResponsesBody
from penstock.shm.messages import ModelCard


class PendingResponse:
    """One request, from its body to its stored answer."""

    def __init__(
        self,
        body: ResponsesBody,
        previous: StoredResponse | None,
        card: ModelCard,
        *,
        encoded: tuple[bytes, bytes] | None = None,
        is_continuable: bool = False,
    ) -> None:
        """previous is the response that the request continues.

        encoded is the result of `encode_input` in another worker, for the same request; then the body has no input.
        is_continuable: later requests may continue the answer, even if it is not stored.
        """
        self.input_items: list[ResponseItem] = input_items(body)
        self.format: ResponsesFormat | None = None
        """Set when the request is about to be submitted."""
        self.ended: StoredResponse | None = None
        """What later requests can refer to; set when the answer is final, if it is stored or can be continued."""
        self.is_stored = body.store is not False
        self.model = answering_name(card, body.model)
        self._is_continuable = is_continuable
        self._body = body
        self._history = NO_MESSAGES if previous is None else previous.message_data
        self._encoded = encoded
        """The request's items, and the conversation up to its answer."""
        self._settings = _settings(body, card)

    def make_format(self, identity: Identity, usage: Usage, streamed_usage: StreamUsageOptions) -> ResponsesFormat:  # noqa: ARG002 - a response's last event always has the usage
        self.format = ResponsesFormat(identity, usage, self._settings, self._take, called_tools(self._body))
        return self.format

    def encode_input(self) -> int:
        """Encode the stored part of the request, except its settings; return its size in bytes. Needed once."""
        self._encoded = self._encode()
        return sum(map(len, self._encoded))

    def _encode(self) -> tuple[bytes, bytes]:
        return msgspec.json.encode(self.input_items), add_messages(self._history, to_messages(self.input_items))

    def begun(self, answer: ResponsesFormat) -> StoredResponse:
        """Return the stored form of a background response while it runs."""
        return self._stored(answer, ())

    def _take(self, answer: ResponsesFormat) -> None:
        if self.is_stored or self._is_continuable:
            self.ended = self._stored(answer, (_as_message(answer),) if answer.blocks else ())

    def _stored(self, answer: ResponsesFormat, answers: tuple[ChatMessage, ...]) -> StoredResponse:
        is_background = self._body.background is True
        items, messages = self._encoded or self._encode()
        return StoredResponse(
            answer.response_id,
            msgspec.json.encode(answer.snapshot()),
            items,
            add_messages(messages, answers),
            is_background=is_background,
            keeps_events=is_background and self._body.stream is True,
        )


def _as_message(answer: ResponsesFormat) -> ChatMessage:
    """Return the answer as a message of the conversation."""
    texts: dict[BlockKind, list[str]] = {BlockKind.TEXT: [], BlockKind.REASONING: []}
    calls: list[MessageToolCall] = []
    for block in answer.blocks:
        if block.is_broken:
            continue
        if block.kind is BlockKind.CALL:
            calls.append(MessageToolCall(block.call_id, FunctionCall(block.name, block.text)))
        else:
            texts[block.kind].append(block.text)
    return ChatMessage(
        "assistant",
        content="".join(texts[BlockKind.TEXT]),
        tool_calls=calls or None,
        reasoning_content="".join(texts[BlockKind.REASONING]) or None,
    )


def _settings(body: ResponsesBody, card: ModelCard) -> dict[str, Any]:
    """Return the response object's fields that repeat the request's settings."""
    default = card.default_sampling
    form = None if body.text is None else body.text.format
    return {
        "background": body.background is True,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "frequency_penalty": _penalty(body.frequency_penalty, default.frequency_penalty),
        "presence_penalty": _penalty(body.presence_penalty, default.presence_penalty),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": default.temperature if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"} if form is None else _without_null(form)},
        "tool_choice": _choice(body),
        "tools": [_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": default.top_p if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _penalty(requested: float | None, default: float) -> float:
    return default if requested is None else requested


def _tool(tool: CallableTool) -> dict[str, Any]:
    """Return a tool as the API describes it. A function has all fields, even those that the request omits."""
    if isinstance(tool, ResponseTool) and tool.tools is not None:
        return _without_null(tool) | {"tools": [_tool(each) for each in tool.tools]}
    if tool.type != "function":
        return _without_null(tool)
    fields: dict[str, Any] = msgspec.to_builtins(tool)
    return {name: fields[name] for name in ("type", "name", "description", "parameters", "strict")}


def _choice(body: ResponsesBody) -> str | dict[str, Any]:
    choice = body.tool_choice
    if not isinstance(choice, NamedToolChoice):
        return choice or "auto"
    tools = {} if choice.tools is None else {"tools": [_without_null(tool) for tool in choice.tools]}
    return _without_null(choice) | tools


def _without_null(value: Struct) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(value)
    return {name: field for name, field in fields.items() if field is not None}
