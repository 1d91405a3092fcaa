"""Pieces of a choice, as they are streamed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b

from msgspec import Struct


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. Only the first piece of a call has id and name."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


def join_tool_calls(pieces: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Join consecutive pieces of the same call's arguments. The first piece of a call stays separate."""
    joined: list[ToolCallDelta] = []
    for piece in pieces:
        if joined and piece.id is None and joined[-1].id is None and joined[-1].index == piece.index:
            joined[-1] = ToolCallDelta(piece.index, joined[-1].arguments + piece.arguments)
        else:
            joined.append(piece)
    return tuple(joined)


def repeatable_call_id(call_id: str, name: str) -> str:
    """Return an id with the prefix and length of call_id that depends only on the name."""
    prefix = "call_" if call_id.startswith("call_") else ""
    digest = blake2b(name.encode()).hexdigest()
    return prefix + digest[: len(call_id) - len(prefix)]


class ScoredToken(Struct, frozen=True, gc=False):
    """A token with its log probability, as answers report it. The garbage collector does not visit it: an answer may
    have hundreds of thousands, and one full collection would hold the event loop for too long.

    logprob is None for the first token of a prompt, which has no preceding tokens.
    """

    token_id: int
    text: str
    raw: bytes
    """The token's bytes; they may be part of a character."""
    logprob: float | None
    rank: int = 0
    top: tuple[ScoredToken, ...] = ()
    offset: int = 0
    """Start of the token in the choice's text, in characters."""


@dataclass(slots=True)
class Delta:
    """A piece of a choice. A field with nothing new is empty."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    token_ids: tuple[int, ...] = ()
    """All tokens of this piece, if the request asks for token ids."""
    logprobs: tuple[ScoredToken, ...] = ()
    parts: tuple[Delta, ...] = ()
    """The same content in order, if it mixes text, reasoning and tool calls."""
    is_call_broken: bool = False
    """The last call is none: its whole text follows as the answer's text."""
    has_progress: bool = False
    """It only reports how much of the prompt is computed."""

    def __bool__(self) -> bool:
        return bool(
            self.text
            or self.reasoning
            or self.tool_calls
            or self.token_ids
            or self.logprobs
            or self.is_call_broken
            or self.has_progress
        )


def with_call_ids(delta: Delta, name: str) -> Delta:
    """Replace the random ids of tool calls by ids that depend only on the name and the call's index."""
    if delta.tool_calls:
        delta.tool_calls = tuple(
            call if call.id is None else replace(call, id=repeatable_call_id(call.id, f"{name} {call.index}"))
            for call in delta.tool_calls
        )
        delta.parts = tuple(with_call_ids(part, name) for part in delta.parts)
    return delta
