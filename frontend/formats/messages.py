"""POST /v1/messages: Anthropic's message object and its stream events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.frontend.formats.base import Format, Identity, Usage, call_arguments, encode
from penstock.frontend.parsing.blocks import BlockKind, ChoiceOutput, OutputBlock, OutputBlocks
from penstock.frontend.parsing.deltas import Delta, ScoredToken
from penstock.frontend.transport.errors import ApiError, anthropic_error

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {
    BlockKind.REASONING: b'"type":"thinking_delta","thinking":',
    BlockKind.TEXT: b'"type":"text_delta","text":',
    BlockKind.CALL: b'"type":"input_json_delta","partial_json":',
}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessagesFormat(Format):
    """A message has one choice."""

    def __init__(self, identity: Identity, usage: Usage, request_id: str, max_context_tokens: int) -> None:
        """request_id is reported with an error."""
        self._identity = identity
        self._usage = usage
        self._request_id = request_id
        self._max_context_tokens = max_context_tokens
        self._blocks = OutputBlocks(self)
        self._delta_head = b""

    def opening(self, index: int, prompt_token_ids: Sequence[int] = ()) -> bytes:  # noqa: ARG002 - one choice, no ids
        return _event("message_start", message=self._message([], None, None, with_output=False))

    def delta(self, index: int, delta: Delta) -> bytes:  # noqa: ARG002
        return self._blocks.take(delta)

    def closing(self, index: int, finish_reason: str, stopped_by: str | int | None) -> bytes:  # noqa: ARG002
        events = self._blocks.close()
        reason, sequence = self._stop(finish_reason, stopped_by)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return events + _event("message_delta", delta=delta, usage=self._usage_fields(with_output=True))

    def end(self) -> bytes:
        return _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        _, body = anthropic_error(error, self._request_id)
        return b"event: error\ndata: %b\n\n" % body

    def whole(self, outputs: list[ChoiceOutput]) -> bytes:
        output = outputs[0]
        self._blocks = output.blocks
        self._blocks.close()
        reason, sequence = self._stop(output.finish_reason, output.stopped_by)
        content = [self._content(block, block.text) for block in self._blocks.all]
        return encode(self._message(content, reason, sequence, with_output=True))

    def _message(
        self, content: list[Any], stop_reason: str | None, stop_sequence: str | None, *, with_output: bool
    ) -> dict[str, Any]:
        return {
            "id": self._identity.response_id,
            "type": "message",
            "role": "assistant",
            "model": self._identity.model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop_sequence,
            "usage": self._usage_fields(with_output=with_output),
        }

    def _usage_fields(self, *, with_output: bool) -> dict[str, Any]:
        """Anthropic's input_tokens do not include cached tokens."""
        usage = self._usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens if with_output else 0,
            "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens if with_output else 0},
        }

    def _stop(self, finish_reason: str, stopped_by: str | int | None) -> tuple[str, str | None]:
        """Return Anthropic's reason for the end, and the stop sequence."""
        usage = self._usage
        if isinstance(stopped_by, str) and finish_reason == "stop":
            return "stop_sequence", stopped_by
        if finish_reason == "length" and usage.prompt_tokens + usage.completion_tokens >= self._max_context_tokens:
            return "model_context_window_exceeded", None
        return _STOP_REASONS[finish_reason], None

    # Implements `BlockEvents`

    def opened(self, block: OutputBlock) -> bytes:
        self._delta_head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{%b' % (
            block.index,
            _DELTAS[block.kind],
        )
        content = self._content(block, "") | ({"signature": ""} if block.kind is BlockKind.REASONING else {})
        start = _event("content_block_start", index=block.index, content_block=content)
        return start + _PING if block.index == 0 else start

    def grown(self, block: OutputBlock, piece: str, logprobs: tuple[ScoredToken, ...]) -> bytes:  # noqa: ARG002
        return b"%b%b}}\n\n" % (self._delta_head, encode(piece))

    def closed(self, block: OutputBlock) -> bytes:
        events = b""
        if block.kind is BlockKind.REASONING:
            delta = {"type": "signature_delta", "signature": self._signature}
            events = _event("content_block_delta", index=block.index, delta=delta)
        return events + _event("content_block_stop", index=block.index)

    def _content(self, block: OutputBlock, text: str) -> dict[str, Any]:
        match block.kind:
            case BlockKind.REASONING:
                return {"type": "thinking", "thinking": text, "signature": self._signature}
            case BlockKind.TEXT:
                return {"type": "text", "text": text}
            case BlockKind.CALL:
                return {
                    "type": "tool_use",
                    "id": block.call_id,
                    "name": block.name,
                    "input": call_arguments(text) or {},
                }

    @property
    def _signature(self) -> str:
        """Clients send thinking back only if it is signed. The signature is the response id; it is not checked."""
        return self._identity.response_id


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name, **fields}))
