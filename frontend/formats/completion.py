"""POST /v1/completions: OpenAI's text completion object and its chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from frontend.formats.base import Chunks, Identity, StreamedUsage, Usage, encode, error_event, fields
from frontend.formats.chat import token_fields
from frontend.formats.logprobs import legacy_logprobs

if TYPE_CHECKING:
    from frontend.deltas import Delta, Message
    from frontend.errors import ApiError


class CompletionFormat:
    """See `Format`."""

    def __init__(self, identity: Identity, usage: Usage, streamed_usage: StreamedUsage = StreamedUsage()) -> None:  # noqa: B008 - frozen
        self._identity = identity
        self._usage = usage
        self._chunks = Chunks(identity, "text_completion", usage, streamed_usage)
        self._offsets: dict[int, int] = {}
        """Of each choice, the characters of the tokens whose log probabilities have been told."""

    def opening(self, index: int) -> bytes:  # noqa: ARG002 - completions have no opening event
        return b""

    def delta(self, index: int, delta: Delta) -> bytes:
        logprobs = b"null"
        if delta.logprobs:
            offset = self._offsets.get(index, 0)
            logprobs = encode(legacy_logprobs(delta.logprobs, offset))
            self._offsets[index] = offset + sum(len(entry.text) for entry in delta.logprobs)
        more = b',"token_ids":' + encode(delta.token_ids) if delta.token_ids else b""
        return self._chunk(index, encode(delta.text), logprobs, more)

    def closing(self, index: int, finish_reason: str, stopped_by: str | int | None) -> bytes:
        more = b"" if stopped_by is None else b',"stop_reason":' + encode(stopped_by)
        return self._chunk(index, b'""', more=more, finish_reason=encode(finish_reason))

    def end(self) -> bytes:
        return self._chunks.end()

    def failure(self, error: ApiError) -> bytes:
        return error_event(error)

    def whole(self, messages: list[Message]) -> bytes:
        choices = [_whole_choice(index, message) for index, message in enumerate(messages)]
        whole = {**fields(self._identity, "text_completion"), "choices": choices, "usage": self._usage.as_dict()}
        return encode(whole)

    def _chunk(
        self, index: int, text: bytes, logprobs: bytes = b"null", more: bytes = b"", finish_reason: bytes = b"null"
    ) -> bytes:
        choice = b'{"index":%d,"text":%b,"logprobs":%b%b,"finish_reason":%b}' % (
            index,
            text,
            logprobs,
            more,
            finish_reason,
        )
        return self._chunks.before + choice + self._chunks.after


def _whole_choice(index: int, message: Message) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": message.text,
        "logprobs": legacy_logprobs(message.logprobs) if message.logprobs else None,
        "finish_reason": message.finish_reason,
    }
    if message.stopped_by is not None:
        choice["stop_reason"] = message.stopped_by
    return choice | token_fields(message)
