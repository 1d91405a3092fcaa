"""What every endpoint's answer is made from, and what a format must offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from penstock.frontend.transport.errors import error_body

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.frontend.parsing.choice_output import ChoiceOutput
    from penstock.frontend.parsing.deltas import Delta
    from penstock.frontend.transport.errors import ApiError

encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Usage:
    """Grows while the request runs: its generation counts, its format reads."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    is_coalesced: bool = False
    timings: Callable[[], dict[str, Any]] | None = None
    """Where they are wanted: as they stand when called."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "penstock": {"coalesced": self.is_coalesced},
        }


@dataclass(frozen=True, slots=True)
class Identity:
    """What every part of one answer repeats."""

    response_id: str
    created: int
    model: str
    system_fingerprint: str | None


class Format(Protocol):
    """One answer. What a streaming method returns are whole server-sent events, or nothing; index is the choice's."""

    def opening(self, index: int, prompt_token_ids: Sequence[int] = ()) -> bytes:
        """Before the choice's first piece, when the request's usage but for its output is known. The prompt's tokens
        are given where they are to be told."""
        ...

    def delta(self, index: int, delta: Delta) -> bytes: ...

    def closing(self, index: int, finish_reason: str, stopped_by: str | int | None) -> bytes: ...

    def end(self) -> bytes:
        """The stream's last events, when all choices are closed."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The stream's last events when it cannot go on: its status has been sent and can no longer say so."""
        ...

    def whole(self, messages: list[ChoiceOutput]) -> bytes:
        """The body of an answer that is not streamed."""
        ...


class OpenAIChunks:
    """The part of OpenAI's chunks that does not change: {"id":…,"object":…,…,"choices":[ before, and ]} after."""

    def __init__(self, identity: Identity, object_name: str, usage: Usage, streamed_usage: StreamUsageOptions) -> None:
        self.before = b"data: " + encode(fields(identity, object_name))[:-1] + b',"choices":['
        self._usage = usage
        self._streamed = streamed_usage
        # A client that asked for usage sees the field in every chunk, null but for the last.
        self._after = b'],"usage":null}\n\n' if streamed_usage.at_the_end else b"]}\n\n"

    @property
    def after(self) -> bytes:
        if not (self._streamed.in_every_chunk or self._streamed.timings_in_every_chunk):
            return self._after
        return self._with_numbers(self._streamed.in_every_chunk, self._streamed.timings_in_every_chunk)

    def _with_numbers(self, has_usage: bool, has_timings: bool) -> bytes:
        told = b"]"
        if has_usage or self._streamed.at_the_end:
            told += b',"usage":' + (encode(self._usage.as_dict()) if has_usage else b"null")
        if has_timings and self._usage.timings is not None:
            told += b',"timings":' + encode(self._usage.timings())
        return told + b"}\n\n"

    def end(self) -> bytes:
        """A chunk without choices for the numbers that are wanted at the end, if any are."""
        if not self._streamed.at_the_end and self._usage.timings is None:
            return DONE
        return self.before + self._with_numbers(self._streamed.at_the_end, has_timings=True) + DONE


@dataclass(frozen=True, slots=True)
class StreamUsageOptions:
    """Where a stream tells its usage."""

    at_the_end: bool = False
    in_every_chunk: bool = False
    timings_in_every_chunk: bool = False


def numbers(usage: Usage) -> dict[str, Any]:
    """The last fields of an answer that is not streamed."""
    timings = {} if usage.timings is None else {"timings": usage.timings()}
    return {"usage": usage.as_dict(), **timings}


def fields(identity: Identity, object_name: str) -> dict[str, Any]:
    return {
        "id": identity.response_id,
        "object": object_name,
        "created": identity.created,
        "model": identity.model,
        "system_fingerprint": identity.system_fingerprint,
    }


def error_event(error: ApiError) -> bytes:
    return b"data: " + error_body(error) + b"\n\n"
