"""POST /v1/completions: OpenAI's text completion object and its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.frontend.formats.base import Identity, StreamUsageOptions, Usage, encode
from penstock.frontend.formats.logprobs import legacy_logprobs, prompt_logprobs
from penstock.frontend.formats.openai_chunks import OpenAIChunks, error_event, object_fields, usage_fields
from penstock.frontend.parsing.blocks import ChoiceOutput
from penstock.frontend.parsing.deltas import Delta
from penstock.frontend.transport.errors import ApiError


class CompletionFormat:
    """Implements `Format`."""

    def __init__(
        self,
        identity: Identity,
        usage: Usage,
        streamed_usage: StreamUsageOptions = StreamUsageOptions(),  # noqa: B008 - frozen
    ) -> None:
        self._identity = identity
        self._usage = usage
        self._chunks = OpenAIChunks(identity, "text_completion", usage, streamed_usage)
        self._prompt_token_ids: dict[int, Sequence[int]] = {}
        """Prompt token ids that the next chunk of a choice reports, by choice."""

    def opening(self, index: int, prompt_token_ids: Sequence[int] = ()) -> bytes:
        if prompt_token_ids:
            self._prompt_token_ids[index] = prompt_token_ids
        return b"" if self._usage.progress is None or index else self._progress(index)

    def delta(self, index: int, delta: Delta) -> bytes:
        return self._progress(index) if delta.has_progress else self._piece(index, delta)

    def _progress(self, index: int) -> bytes:
        progress = {} if self._usage.progress is None else self._usage.progress()
        chunk = self._chunk(index, b'""')
        return chunk[:-3] + b',"prompt_progress":' + encode(progress) + chunk[-3:]

    def last(self, index: int, delta: Delta, finish_reason: str, stopped_by: str | int | None) -> bytes:
        more = b"" if stopped_by is None else b',"stop_reason":' + encode(stopped_by)
        return self._piece(index, delta, more, encode(finish_reason))

    def closing(self, index: int, finish_reason: str, stopped_by: str | int | None) -> bytes:
        return self.last(index, Delta(), finish_reason, stopped_by)

    def _piece(self, index: int, delta: Delta, more: bytes = b"", finish_reason: bytes = b"null") -> bytes:
        logprobs = encode(legacy_logprobs(delta.logprobs)) if delta.logprobs else b"null"
        if delta.token_ids:
            more = b',"token_ids":' + encode(delta.token_ids) + more
        return self._chunk(index, encode(delta.text), logprobs, more, finish_reason)

    def end(self) -> bytes:
        return self._chunks.end()

    def failure(self, error: ApiError) -> bytes:
        return error_event(error)

    def whole(self, outputs: list[ChoiceOutput]) -> bytes:
        choices = [_whole_choice(index, output) for index, output in enumerate(outputs)]
        whole = {**object_fields(self._identity, "text_completion"), "choices": choices, **usage_fields(self._usage)}
        return encode(whole)

    def _chunk(
        self, index: int, text: bytes, logprobs: bytes = b"null", more: bytes = b"", finish_reason: bytes = b"null"
    ) -> bytes:
        if self._prompt_token_ids and (prompt_token_ids := self._prompt_token_ids.pop(index, None)) is not None:
            more = b',"prompt_token_ids":' + encode(prompt_token_ids) + more
        choice = b'{"index":%d,"text":%b,"logprobs":%b%b,"finish_reason":%b}' % (
            index,
            text,
            logprobs,
            more,
            finish_reason,
        )
        return self._chunks.before + choice + self._chunks.after


def _whole_choice(index: int, output: ChoiceOutput) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": output.text,
        "logprobs": legacy_logprobs(output.logprobs) if output.logprobs else None,
        "finish_reason": output.finish_reason,
    }
    if output.stopped_by is not None:
        choice["stop_reason"] = output.stopped_by
    if output.prompt_token_ids is not None:
        choice["prompt_token_ids"] = output.prompt_token_ids
        choice["token_ids"] = output.token_ids
    if output.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
    return choice
