"""A Responses request in progress: makes its answer's format, and stores the finished answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from penstock.frontend.endpoints.responses.items import input_items, to_messages
from penstock.frontend.endpoints.responses.store import StoredResponse
from penstock.frontend.formats.responses import ResponsesFormat
from penstock.frontend.parsing.blocks import BlockKind
from penstock.frontend.schemas.chat import ChatMessage, FunctionCall, MessageToolCall
from penstock.frontend.schemas.responses import NamedToolChoice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msgspec import Struct

    from penstock.frontend.endpoints.responses.store import ResponseStore
    from penstock.frontend.formats.base import Identity, StreamUsageOptions, Usage
    from penstock.frontend.schemas.responses import ResponseItem, ResponsesBody
    from penstock.shm.messages import ModelCard


class PendingResponse:
    """One request, from its body to its stored answer."""

    def __init__(
        self,
        store: ResponseStore,
        tenant: bytes,
        body: ResponsesBody,
        previous: StoredResponse | None,
        card: ModelCard,
    ) -> None:
        """previous is the response that the request continues."""
        self.input_items: list[ResponseItem] = input_items(body)
        self.format: ResponsesFormat | None = None
        """Set when the request is about to be submitted."""
        self._store = store
        self._tenant = tenant
        self._body = body
        self._previous = previous
        self._settings = _settings(body, card)

    def make_format(self, identity: Identity, usage: Usage, streamed_usage: StreamUsageOptions) -> ResponsesFormat:  # noqa: ARG002 - a response's last event always has the usage
        on_end = _ignore if self._body.background else self.keep
        self.format = ResponsesFormat(identity, usage, self._settings, on_end)
        return self.format

    def keep(self, answer: ResponsesFormat, events: Sequence[bytes] | None = None) -> None:
        """Store the final answer, unless the request says store=false. events can be streamed again later."""
        if self._body.store is False:
            return
        added = (*to_messages(self.input_items), _as_message(answer))
        # Twice: the objects take about as much as their texts.
        num_bytes = 2 * len(msgspec.json.encode(added))
        history: tuple[ChatMessage, ...] = ()
        if self._previous is not None:
            history = self._previous.messages
            num_bytes += self._previous.num_message_bytes
        stored = StoredResponse(
            answer.response_id,
            msgspec.json.encode(answer.snapshot()),
            msgspec.json.encode(self.input_items),
            (*history, *added),
            num_bytes,
            is_background=self._body.background is True,
            events=None if events is None else list(events),
        )
        self._store.put(self._tenant, stored)


def _ignore(answer: ResponsesFormat) -> None:
    """Do nothing: a background run stores its answer itself, with its events."""


def _as_message(answer: ResponsesFormat) -> ChatMessage:
    """Return the answer as a message of the conversation."""
    texts: dict[BlockKind, list[str]] = {BlockKind.TEXT: [], BlockKind.REASONING: []}
    calls: list[MessageToolCall] = []
    for block in answer.blocks:
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
        "tools": [_without_null(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": default.top_p if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def _choice(body: ResponsesBody) -> str | dict[str, Any]:
    choice = body.tool_choice
    if not isinstance(choice, NamedToolChoice):
        return choice or "auto"
    tools = {} if choice.tools is None else {"tools": [_without_null(tool) for tool in choice.tools]}
    return _without_null(choice) | tools


def _without_null(value: Struct) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(value)
    return {name: field for name, field in fields.items() if field is not None}
