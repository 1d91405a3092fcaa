"""The answers of both endpoints, whole and as server-sent events, with all that is constant serialised once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

_encode = msgspec.json.encode

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    is_coalesced: bool

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
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
    """How one endpoint words its answer. The events are whole server-sent events; index is the choice's."""

    def opening(self, index: int) -> bytes: ...

    def delta(self, index: int, text: str) -> bytes: ...

    def closing(self, index: int, finish_reason: str) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...

    def whole(self, texts: list[str], finish_reasons: list[str], usage: Usage) -> bytes: ...


class _Events:
    """The part of a chunk that does not change: {"id":…,"object":…,…,"choices":[ before, and ]} after."""

    def __init__(self, identity: Identity, object_name: str, *, include_usage: bool) -> None:
        fields = _fields(identity, object_name)
        self.before = b"data: " + _encode(fields)[:-1] + b',"choices":['
        # A client that asked for usage sees the field in every chunk, null but for the last.
        self.after = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def usage(self, usage: Usage) -> bytes:
        return self.before + b'],"usage":' + _encode(usage.as_dict()) + b"}\n\n"


def _fields(identity: Identity, object_name: str) -> dict[str, Any]:
    return {
        "id": identity.response_id,
        "object": object_name,
        "created": identity.created,
        "model": identity.model,
        "system_fingerprint": identity.system_fingerprint,
    }


class ChatFormat:
    """POST /v1/chat/completions."""

    def __init__(self, identity: Identity, *, include_usage: bool) -> None:
        self._identity = identity
        self._events = _Events(identity, "chat.completion.chunk", include_usage=include_usage)
        self._delta_after = b'},"logprobs":null,"finish_reason":null}' + self._events.after

    def opening(self, index: int) -> bytes:
        role = b'{"index":%d,"delta":{"role":"assistant","content":""' % index
        return self._events.before + role + self._delta_after

    def delta(self, index: int, text: str) -> bytes:
        content = b'{"index":%d,"delta":{"content":%b' % (index, _encode(text))
        return self._events.before + content + self._delta_after

    def closing(self, index: int, finish_reason: str) -> bytes:
        choice = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b}' % (index, _encode(finish_reason))
        return self._events.before + choice + self._events.after

    def usage(self, usage: Usage) -> bytes:
        return self._events.usage(usage)

    def whole(self, texts: list[str], finish_reasons: list[str], usage: Usage) -> bytes:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, (text, reason) in enumerate(zip(texts, finish_reasons, strict=True))
        ]
        return _encode({**_fields(self._identity, "chat.completion"), "choices": choices, "usage": usage.as_dict()})


class CompletionFormat:
    """POST /v1/completions."""

    def __init__(self, identity: Identity, *, include_usage: bool) -> None:
        self._identity = identity
        self._events = _Events(identity, "text_completion", include_usage=include_usage)
        self._delta_after = b',"logprobs":null,"finish_reason":null}' + self._events.after

    def opening(self, index: int) -> bytes:  # noqa: ARG002 - completions have no opening event
        return b""

    def delta(self, index: int, text: str) -> bytes:
        return self._events.before + b'{"index":%d,"text":%b' % (index, _encode(text)) + self._delta_after

    def closing(self, index: int, finish_reason: str) -> bytes:
        choice = b'{"index":%d,"text":"","logprobs":null,"finish_reason":%b}' % (index, _encode(finish_reason))
        return self._events.before + choice + self._events.after

    def usage(self, usage: Usage) -> bytes:
        return self._events.usage(usage)

    def whole(self, texts: list[str], finish_reasons: list[str], usage: Usage) -> bytes:
        choices = [
            {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
            for index, (text, reason) in enumerate(zip(texts, finish_reasons, strict=True))
        ]
        return _encode({**_fields(self._identity, "text_completion"), "choices": choices, "usage": usage.as_dict()})
