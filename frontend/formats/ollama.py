"""POST /api/chat and /api/generate: Ollama's answer, whole or as lines of JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from penstock.frontend.formats.base import Format, Usage, call_arguments, encode
from penstock.frontend.formats.logprobs import chat_entries
from penstock.frontend.parsing.blocks import BlockKind, ChoiceOutput, OutputBlock, OutputBlocks
from penstock.frontend.parsing.deltas import Delta, ScoredToken
from penstock.frontend.transport.errors import ApiError

_NS_PER_MS = 1_000_000


class OllamaFormat(Format):
    """An answer has one choice."""

    def __init__(self, model: str, usage: Usage, load_s: float, *, is_chat: bool, returns_context: bool) -> None:
        """load_s is the time until the model was there. returns_context: the answer has the tokens so far."""
        self._model = model
        self._usage = usage
        self._load_s = load_s
        self._is_chat = is_chat
        self._returns_context = returns_context
        self._blocks = OutputBlocks(self)
        self._context: list[int] = []

    def opening(self, index: int, prompt_token_ids: Sequence[int] = ()) -> bytes:  # noqa: ARG002 - one choice
        self._context += prompt_token_ids
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:  # noqa: ARG002
        self._context += delta.token_ids
        return self._blocks.take(delta)

    def closing(self, index: int, finish_reason: str, stopped_by: str | int | None) -> bytes:  # noqa: ARG002
        return self._blocks.close() + self._line({"content": ""}, self._end(finish_reason))

    def end(self) -> bytes:
        return b""

    def failure(self, error: ApiError) -> bytes:
        return encode({"error": error.message}) + b"\n"

    def whole(self, outputs: list[ChoiceOutput]) -> bytes:
        output = outputs[0]
        self._context = [*(output.prompt_token_ids or ()), *output.token_ids]
        parts: dict[str, Any] = {"content": output.text}
        if output.reasoning:
            parts["thinking"] = output.reasoning
        calls = [block for block in output.blocks.all if _is_whole_call(block)]
        if calls:
            parts["tool_calls"] = [_call(number, block) for number, block in enumerate(calls)]
        logprobs = {"logprobs": chat_entries(output.logprobs)} if output.logprobs else {}
        return self._line(parts, {**self._end(output.finish_reason), **logprobs}).rstrip(b"\n")

    def _line(self, parts: dict[str, Any], more: dict[str, Any]) -> bytes:
        if self._is_chat:
            parts = {"message": {"role": "assistant", **parts}}
        else:
            parts = {("response" if name == "content" else name): part for name, part in parts.items()}
        return encode({"model": self._model, "created_at": now(), **parts, "done": False, **more}) + b"\n"

    def _end(self, finish_reason: str) -> dict[str, Any]:
        usage = self._usage
        timings = usage.timings() if usage.timings is not None else {}
        end = {
            "done": True,
            "done_reason": "length" if finish_reason == "length" else "stop",
            "total_duration": _ns(timings.get("total_ms")),
            "load_duration": round(self._load_s * 1e9),
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _ns(timings.get("prompt_ms")),
            "eval_count": usage.completion_tokens,
            "eval_duration": _ns(timings.get("predicted_ms")),
        }
        return {**end, "context": self._context} if self._returns_context else end

    # Implements `BlockEvents`

    def opened(self, block: OutputBlock) -> bytes:  # noqa: ARG002
        return b""

    def grown(self, block: OutputBlock, piece: str, logprobs: tuple[ScoredToken, ...]) -> bytes:
        more = {"logprobs": chat_entries(logprobs)} if logprobs else {}
        match block.kind:
            case BlockKind.TEXT:
                return self._line({"content": piece}, more)
            case BlockKind.REASONING:
                return self._line({"content": "", "thinking": piece}, more)
            case BlockKind.CALL:  # a call is sent whole
                return b""

    def closed(self, block: OutputBlock) -> bytes:
        if block.is_broken or not _is_whole_call(block):
            return b""
        number = sum(other.kind is BlockKind.CALL for other in self._blocks.all[: block.index])
        return self._line({"content": "", "tool_calls": [_call(number, block)]}, {})


def without_answer(model: str, reason: str, *, is_chat: bool) -> bytes:
    """Return the answer to a request that only loads or unloads a model."""
    parts = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return encode({"model": model, "created_at": now(), **parts, "done": True, "done_reason": reason})


def now() -> str:
    return rfc3339(datetime.now(UTC))


def rfc3339(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def _is_whole_call(block: OutputBlock) -> bool:
    """Whether to show the block as a call. Arguments are objects, so a call that was cut off would look whole."""
    return block.kind is BlockKind.CALL and call_arguments(block.text) is not None


def _call(number: int, block: OutputBlock) -> dict[str, Any]:
    function = {"index": number, "name": block.name, "arguments": call_arguments(block.text)}
    return {"id": block.call_id, "function": function}


def _ns(duration_ms: float | None) -> int:
    return round((duration_ms or 0.0) * _NS_PER_MS)
