"""The interface of an answer format, and the values that every answer contains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from penstock.frontend.parsing.blocks import ChoiceOutput
from penstock.frontend.parsing.deltas import Delta
from penstock.frontend.transport.errors import ApiError

encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Usage:
    """The request's usage so far. `ChoiceRunner` updates it, the format reads it."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    is_coalesced: bool = False
    timings: Callable[[], dict[str, Any]] | None = None
    """Returns the timings so far; None if the request does not ask for them."""
    progress: Callable[[], dict[str, Any]] | None = None
    """Returns the progress of the prompt; None if the request does not ask for it."""

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
    """Identifies an answer; repeated in each of its parts."""

    response_id: str
    created: int
    model: str
    system_fingerprint: str | None


class Format(Protocol):
    """Writes one answer.

    The streaming methods return complete server-sent events, or nothing. index is the index of the choice.
    """

    def opening(self, index: int, prompt_token_ids: Sequence[int] = ()) -> bytes:
        """Begin a choice. By now the usage is known, except for the output.

        prompt_token_ids is empty unless the request asks for token ids.
        """

    def delta(self, index: int, delta: Delta) -> bytes: ...

    def closing(self, index: int, finish_reason: str, stopped_by: str | int | None) -> bytes: ...

    def last(self, index: int, delta: Delta, finish_reason: str, stopped_by: str | int | None) -> bytes:
        """Write the final piece of a choice and close it, in one event if the API has one for both."""
        return self.delta(index, delta) + self.closing(index, finish_reason, stopped_by)

    def end(self) -> bytes:
        """End the stream, after all choices are closed."""

    def failure(self, error: ApiError) -> bytes:
        """End the stream with an error. The HTTP status is already sent and cannot report it."""

    def whole(self, outputs: list[ChoiceOutput]) -> bytes:
        """Return the body of an answer that is not streamed."""


class NotStreamed(Exception):
    """A bug of ours: this answer has no events."""


class WholeFormat:
    """The part of `Format` for answers without a stream; their bodies cannot ask for one."""

    def _never(self, *_: object, **__: object) -> bytes:
        raise NotStreamed

    opening = delta = last = closing = end = failure = _never


@dataclass(frozen=True, slots=True)
class StreamUsageOptions:
    """Which chunks of a stream report the usage."""

    at_the_end: bool = False
    in_every_chunk: bool = False
    timings_in_every_chunk: bool = False


def call_arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments as an object; None if the call was cut off or the model wrote something else."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
