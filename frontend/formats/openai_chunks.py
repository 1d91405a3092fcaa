"""The parts that OpenAI's chat and text completions share: chunks, usage and errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.frontend.formats.base import Identity, StreamUsageOptions, Usage, encode
from penstock.frontend.transport.errors import ApiError, error_body

DONE = b"data: [DONE]\n\n"


class OpenAIChunks:
    """The constant parts of a chunk: {"id":…,"object":…,…,"choices":[ before the choice, and ]} after it."""

    def __init__(self, identity: Identity, object_name: str, usage: Usage, streamed_usage: StreamUsageOptions) -> None:
        self.before = b"data: " + encode(object_fields(identity, object_name))[:-1] + b',"choices":['
        self._usage = usage
        self._streamed = streamed_usage
        # If the client asks for usage, every chunk has the field; it is null in all but the last.
        self._after = b'],"usage":null}\n\n' if streamed_usage.at_the_end else b"]}\n\n"
        self._num_reported = self._num_reported_reasoning = 0
        """Tokens that the latest chunk with usage counts."""

    @property
    def after(self) -> bytes:
        if not (self._streamed.in_every_chunk or self._streamed.timings_in_every_chunk):
            return self._after
        usage = self._usage
        self._num_reported, self._num_reported_reasoning = usage.completion_tokens, usage.reasoning_tokens
        return self._with_usage(self._streamed.in_every_chunk, self._streamed.timings_in_every_chunk)

    @property
    def after_opening(self) -> bytes:
        """The end of the chunk before a choice's first token: it adds no counts and no timings."""
        if not self._streamed.in_every_chunk:
            return self._after
        reported = replace(
            self._usage, completion_tokens=self._num_reported, reasoning_tokens=self._num_reported_reasoning
        )
        return b'],"usage":' + encode(reported.as_dict()) + b"}\n\n"

    def _with_usage(self, has_usage: bool, has_timings: bool) -> bytes:
        fields = b"]"
        if has_usage or self._streamed.at_the_end:
            fields += b',"usage":' + (encode(self._usage.as_dict()) if has_usage else b"null")
        if has_timings and self._usage.timings is not None:
            fields += b',"timings":' + encode(self._usage.timings())
        return fields + b"}\n\n"

    def end(self) -> bytes:
        """Return the end of the stream: usage and timings in a chunk without choices, if requested, and [DONE]."""
        if not self._streamed.at_the_end and self._usage.timings is None:
            return DONE
        return self.before + self._with_usage(self._streamed.at_the_end, has_timings=True) + DONE


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Return the last fields of an answer that is not streamed."""
    timings = {} if usage.timings is None else {"timings": usage.timings()}
    return {"usage": usage.as_dict(), **timings}


def object_fields(identity: Identity, object_name: str) -> dict[str, Any]:
    return {
        "id": identity.response_id,
        "object": object_name,
        "created": identity.created,
        "model": identity.model,
        "system_fingerprint": identity.system_fingerprint,
    }


def error_event(error: ApiError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"
