"""POST /v1/chat/completions: OpenAI's chat completion object and its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.frontend.formats.base import Identity, StreamUsageOptions, Usage, encode
from penstock.frontend.formats.logprobs import chat_logprobs, prompt_logprobs
from penstock.frontend.formats.openai_chunks import OpenAIChunks, error_event, object_fields, usage_fields
from penstock.frontend.parsing.blocks import ChoiceOutput
from penstock.frontend.parsing.deltas import Delta, ToolCallDelta
from penstock.frontend.transport.errors import ApiError

_TEXT_TAIL = b'},"logprobs":null,"finish_reason":null}'


class ChatFormat:
    """Implements `Format`."""

    def __init__(
        self,
        identity: Identity,
        usage: Usage,
        streamed_usage: StreamUsageOptions = StreamUsageOptions(),  # noqa: B008 - frozen
    ) -> None:
        self._identity = identity
        self._usage = usage
        self._chunks = OpenAIChunks(identity, "chat.completion.chunk", usage, streamed_usage)
        self._text_heads: dict[int, bytes] = {}
        """The start of a chunk with only text, by choice."""

    def opening(self, index: int, prompt_token_ids: Sequence[int] = ()) -> bytes:
        chunk = self._chunk(index, b'{"role":"assistant","content":""}', after=self._chunks.after_opening)
        more = b""
        if prompt_token_ids and index == 0:
            more += b',"prompt_token_ids":' + encode(prompt_token_ids)
        return chunk[:-3] + more + (self._progress() if index == 0 else b"") + chunk[-3:]

    def _progress(self) -> bytes:
        """A field of a chunk, or nothing if it is not asked for."""
        return b"" if self._usage.progress is None else b',"prompt_progress":' + encode(self._usage.progress())

    def last(self, index: int, delta: Delta, finish_reason: str, stopped_by: str | int | None) -> bytes:
        if delta.reasoning or delta.tool_calls:
            return self.delta(index, delta) + self.closing(index, finish_reason, stopped_by)
        return self._piece(index, delta, _stop_reason(stopped_by), encode(finish_reason))

    def delta(self, index: int, delta: Delta) -> bytes:
        if delta.has_progress:
            chunk = self._chunk(index, b"{}")
            return chunk[:-3] + self._progress() + chunk[-3:]
        if delta.text and not (delta.reasoning or delta.tool_calls or delta.logprobs or delta.token_ids):
            return b"".join((self._text_head(index), encode(delta.text), _TEXT_TAIL, self._chunks.after))
        return self._piece(index, delta)

    def _piece(self, index: int, delta: Delta, more: bytes = b"", finish_reason: bytes = b"null") -> bytes:
        changes: dict[str, Any] = {}
        if delta.reasoning:
            changes["reasoning"] = changes["reasoning_content"] = delta.reasoning
        if delta.text:
            changes["content"] = delta.text
        first, *others = delta.tool_calls or (None,)
        if first is not None:
            changes["tool_calls"] = [_tool_call(first)]
        logprobs = encode(chat_logprobs(delta.logprobs)) if delta.logprobs else b"null"
        if delta.token_ids:
            more = b',"token_ids":' + encode(delta.token_ids) + more
        # One tool call per chunk: clients ignore the others.
        chunks = [encode({"tool_calls": [_tool_call(piece)]}) for piece in others if piece is not None]
        chunk = self._chunk(index, encode(changes), logprobs, more, finish_reason)
        return chunk + b"".join(self._chunk(index, c) for c in chunks)

    def _text_head(self, index: int) -> bytes:
        head = self._text_heads.get(index)
        if head is None:
            head = self._text_heads[index] = self._chunks.before + b'{"index":%d,"delta":{"content":' % index
        return head

    def closing(self, index: int, finish_reason: str, stopped_by: str | int | None) -> bytes:
        return self._chunk(index, b"{}", more=_stop_reason(stopped_by), finish_reason=encode(finish_reason))

    def end(self) -> bytes:
        return self._chunks.end()

    def failure(self, error: ApiError) -> bytes:
        return error_event(error)

    def whole(self, outputs: list[ChoiceOutput]) -> bytes:
        choices = [_whole_choice(index, output) for index, output in enumerate(outputs)]
        whole = {**object_fields(self._identity, "chat.completion"), "choices": choices, **usage_fields(self._usage)}
        # All choices of a chat have the same prompt.
        first = outputs[0]
        if first.prompt_token_ids is not None:
            whole["prompt_token_ids"] = first.prompt_token_ids
        if first.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(first.prompt_logprobs)
        return encode(whole)

    def _chunk(
        self,
        index: int,
        delta: bytes,
        logprobs: bytes = b"null",
        more: bytes = b"",
        finish_reason: bytes = b"null",
        after: bytes | None = None,
    ) -> bytes:
        choice = b'{"index":%d,"delta":%b,"logprobs":%b%b,"finish_reason":%b}' % (
            index,
            delta,
            logprobs,
            more,
            finish_reason,
        )
        return self._chunks.before + choice + (self._chunks.after if after is None else after)


def _stop_reason(stopped_by: str | int | None) -> bytes:
    return b"" if stopped_by is None else b',"stop_reason":' + encode(stopped_by)


def _tool_call(piece: ToolCallDelta) -> dict[str, Any]:
    if piece.id is None:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.index, "id": piece.id, "type": "function", "function": function}


def _whole_choice(index: int, output: ChoiceOutput) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in output.tool_calls
    ]
    message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
    if output.reasoning:
        message["reasoning"] = message["reasoning_content"] = output.reasoning
    if calls:
        message["tool_calls"] = calls
        message["content"] = output.text or None
    choice: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(output.logprobs) if output.logprobs else None,
        "finish_reason": output.finish_reason,
    }
    if output.stopped_by is not None:
        choice["stop_reason"] = output.stopped_by
    if output.prompt_token_ids is not None:
        choice["token_ids"] = output.token_ids
    return choice
