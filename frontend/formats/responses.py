"""POST /v1/responses: OpenAI's response object and its stream events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from penstock.frontend.formats.base import Format, Identity, Usage, encode
from penstock.frontend.formats.logprobs import chat_entries
from penstock.frontend.parsing.blocks import BlockKind, ChoiceOutput, OutputBlock, OutputBlocks
from penstock.frontend.parsing.deltas import Delta, ScoredToken, repeatable_call_id
from penstock.frontend.transport.errors import ApiError


class _CustomInput(msgspec.Struct):
    input: str


_custom_input = msgspec.json.Decoder(_CustomInput)


@dataclass(frozen=True, slots=True)
class CalledTool:
    """The client's name for a tool. The model calls a custom tool as a function whose argument is the input."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    def fields(self, arguments: str) -> dict[str, Any]:
        """Return the fields of an item that name the tool and give its arguments."""
        where = {} if self.namespace is None else {"namespace": self.namespace}
        if self.is_custom:
            return {"type": "custom_tool_call", "name": self.name, **where, "input": custom_input(arguments)}
        return {"type": "function_call", "name": self.name, **where, "arguments": arguments}


def custom_input(arguments: str) -> str:
    """Return the text within a call's arguments.

    If the answer was cut off within them, return them unchanged.
    """
    try:
        return _custom_input.decode(arguments.encode()).input
    except (msgspec.DecodeError, msgspec.ValidationError):
        return arguments


def custom_arguments(text: str) -> str:
    """Return the arguments with which the model has called a custom tool."""
    return msgspec.json.encode(_CustomInput(text)).decode()


_ID_PREFIXES = {BlockKind.REASONING: "rs_", BlockKind.TEXT: "msg_", BlockKind.CALL: "fc_"}
_NO_ENTRIES = chat_entries(())
_PART_TYPES = {BlockKind.REASONING: "reasoning_text", BlockKind.TEXT: "output_text"}


class ResponsesFormat(Format):
    """A response has one choice."""

    def __init__(
        self,
        identity: Identity,
        usage: Usage,
        settings: Mapping[str, Any],
        on_end: Callable[[ResponsesFormat], None],
        called_tools: Mapping[str, CalledTool] | None = None,
    ) -> None:
        """settings are the object's fields that are known in advance. on_end is called when the answer is final.

        called_tools are the tools that are not plain functions, by the name that the model knows.
        """
        self.response_id = identity.response_id
        self.status = "queued"
        self.num_events = 0
        """Events so far; also the sequence_number of the next one."""
        fixed = {"id": identity.response_id, "object": "response", "created_at": identity.created, **settings}
        self._fixed = {name: Raw(encode(value)) for name, value in fixed.items()}
        """Encoded once: tools may be large, and are repeated in every event with the whole response."""
        self._model = identity.model
        self._usage = usage
        self._on_end = on_end
        self._called_tools = called_tools or {}
        self._blocks = OutputBlocks(self)
        self._cut_block: OutputBlock | None = None
        """The block in which the answer broke off."""
        self._id_suffix = identity.response_id.partition("_")[2]
        self._delta_head = b""
        self._error: dict[str, str] | None = None
        self._ended_at: int | None = None

    @property
    def blocks(self) -> list[OutputBlock]:
        return self._blocks.all

    @property
    def error_message(self) -> str | None:
        """Why the answer failed; None unless it did."""
        return None if self._error is None else self._error["message"]

    def opening(self, index: int, prompt_token_ids: Sequence[int] = ()) -> bytes:  # noqa: ARG002 - one choice, no ids
        self.status = "in_progress"
        response = self.snapshot()
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def delta(self, index: int, delta: Delta) -> bytes:  # noqa: ARG002
        return self._blocks.take(delta)

    def closing(self, index: int, finish_reason: str, stopped_by: str | int | None) -> bytes:  # noqa: ARG002
        events = b"" if self._blocks.all else self._blocks.begin(BlockKind.TEXT)
        if finish_reason == "length":
            self._cut_block = self._blocks.current
        events += self._blocks.close()
        self._finish("incomplete" if finish_reason == "length" else "completed")
        return events

    def end(self) -> bytes:
        event = self._event(f"response.{self.status}", response=self.snapshot())
        self._on_end(self)
        return event

    def end_unanswered(self) -> bytes:
        """End a response that has no output."""
        self._finish("completed")
        return self.end()

    def failure(self, error: ApiError) -> bytes:
        events = self.opening(0) if self.status == "queued" else b""
        self._error = {"code": _error_code(error), "message": error.message}
        self._break_off("failed")
        return events + self.end()

    def cancel(self) -> None:
        """End the response because a client cancelled it. Writes no event."""
        self._break_off("cancelled")
        self._on_end(self)

    def whole(self, outputs: list[ChoiceOutput]) -> bytes:
        output = outputs[0]
        self._blocks = output.blocks
        self.closing(0, output.finish_reason, output.stopped_by)
        self._on_end(self)
        return encode(self.snapshot())

    def snapshot(self) -> dict[str, Any]:
        """Return the response object in its present state."""
        is_final = self._ended_at is not None
        return {
            **self._fixed,
            "model": self._model,
            "status": self.status,
            "completed_at": self._ended_at if self.status == "completed" else None,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self.status == "incomplete" else None,
            "output": [self._item(block) for block in self._blocks.all],
            "usage": self._usage_fields() if is_final else None,
        }

    def _finish(self, status: str) -> None:
        self.status = status
        self._ended_at = int(time.time())

    def _break_off(self, status: str) -> None:
        self._cut_block = self._blocks.current
        self._blocks.current = None
        self._finish(status)

    def _usage_fields(self) -> dict[str, Any]:
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "penstock": {"coalesced": usage.is_coalesced},
        }

    # Implements `BlockEvents`

    def opened(self, block: OutputBlock) -> bytes:
        if block.kind is BlockKind.CALL:
            block.call_id = self._call_id(block)
        item = self._item(block)
        if block.kind is not BlockKind.CALL:
            item["content"] = []
        events = self._event("response.output_item.added", output_index=block.index, item=item)
        location = self._location(block)
        if block.kind is BlockKind.CALL:
            if not self._called(block).is_custom:
                self._delta_head = self._head("response.function_call_arguments.delta", location)
            return events
        location["content_index"] = 0
        part = _part(block.kind, "")
        events += self._event("response.content_part.added", **location, part=part)
        name = "response.output_text.delta" if block.kind is BlockKind.TEXT else "response.reasoning_text.delta"
        self._delta_head = self._head(name, location)
        return events

    def grown(self, block: OutputBlock, piece: str, logprobs: tuple[ScoredToken, ...]) -> bytes:
        if block.kind is BlockKind.CALL and self._called(block).is_custom:
            return b""  # the input is in JSON, and known when that is complete
        number = self.num_events
        self.num_events += 1
        if block.kind is not BlockKind.TEXT:
            return b'%b%b,"sequence_number":%d}\n\n' % (self._delta_head, encode(piece), number)
        entries = bytes(chat_entries(logprobs)) if logprobs else b"[]"
        return b'%b%b,"logprobs":%b,"sequence_number":%d}\n\n' % (self._delta_head, encode(piece), entries, number)

    def closed(self, block: OutputBlock) -> bytes:
        location, text = self._location(block), block.text
        if block.kind is BlockKind.CALL and self._called(block).is_custom:
            name, given = "response.custom_tool_call_input", custom_input(text)
            events = self._event(f"{name}.delta", **location, delta=given)
            events += self._event(f"{name}.done", **location, input=given)
        elif block.kind is BlockKind.CALL:
            events = self._event("response.function_call_arguments.done", **location, arguments=text)
        else:
            location["content_index"] = 0
            logprobs = chat_entries(block.logprobs)
            part = _part(block.kind, text, logprobs)
            if block.kind is BlockKind.TEXT:
                events = self._event("response.output_text.done", **location, text=text, logprobs=logprobs)
            else:
                events = self._event("response.reasoning_text.done", **location, text=text)
            events += self._event("response.content_part.done", **location, part=part)
        return events + self._event("response.output_item.done", output_index=block.index, item=self._item(block))

    def _item(self, block: OutputBlock) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(block), "type": "message", "status": self._item_status(block)}
        match block.kind:
            case BlockKind.CALL:
                return item | {"call_id": block.call_id, **self._called(block).fields(block.text)}
            case BlockKind.REASONING:
                content = [_part(block.kind, block.text)]
                return item | {"type": "reasoning", "summary": [], "content": content}
            case BlockKind.TEXT:
                content = [_part(block.kind, block.text, chat_entries(block.logprobs))]
                return item | {"role": "assistant", "content": content}

    def _called(self, block: OutputBlock) -> CalledTool:
        return self._called_tools.get(block.name) or CalledTool(block.name)

    def _item_status(self, block: OutputBlock) -> str:
        if block is self._cut_block or block.is_broken:
            return "incomplete"
        return "in_progress" if block is self._blocks.current else "completed"

    def _item_id(self, block: OutputBlock) -> str:
        return f"{_ID_PREFIXES[block.kind]}{self._id_suffix}_{block.index}"

    def _call_id(self, block: OutputBlock) -> str:
        """Return an id in the usual form that depends only on the response's id and the block.

        When another worker repeats the answer, its events are the same.
        """
        return repeatable_call_id(block.call_id, f"{self.response_id} {block.index}")

    def _location(self, block: OutputBlock) -> dict[str, Any]:
        return {"item_id": self._item_id(block), "output_index": block.index}

    def _event(self, name: str, **fields: Any) -> bytes:
        number = self.num_events
        self.num_events += 1
        data = encode({"type": name, **fields, "sequence_number": number})
        return b"event: %b\ndata: %b\n\n" % (name.encode(), data)

    def _head(self, name: str, location: dict[str, Any]) -> bytes:
        """Return the part of a block's delta events before the piece."""
        data = encode({"type": name, **location})[:-1]
        return b'event: %b\ndata: %b,"delta":' % (name.encode(), data)


def response_of_item(item_id: str) -> str:
    """Return the id of the response that contains the item, if the item's id is one of ours."""
    return f"resp_{item_id.partition('_')[2].rpartition('_')[0]}"


def _part(kind: BlockKind, text: str, logprobs: Raw = _NO_ENTRIES) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PART_TYPES[kind], "text": text}
    return part | {"annotations": [], "logprobs": logprobs} if kind is BlockKind.TEXT else part


def _error_code(error: ApiError) -> str:
    """Return one of the error codes that the Responses API defines."""
    if error.kind.status == 429:
        return "rate_limit_exceeded"
    return "server_error" if error.kind.status >= 499 else "invalid_prompt"
