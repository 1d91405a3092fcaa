"""What comes out of a choice: piece by piece as it streams, and whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. id and name come with the call's first piece only."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


def joined_calls(pieces: Iterable[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """Arguments of a call that follow one another as one piece; where a call begins is a piece of its own."""
    joined: list[ToolCallDelta] = []
    for piece in pieces:
        if joined and piece.id is None and joined[-1].id is None and joined[-1].index == piece.index:
            joined[-1] = ToolCallDelta(piece.index, joined[-1].arguments + piece.arguments)
        else:
            joined.append(piece)
    return tuple(joined)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token as answers report it. raw is its text in bytes, which may be a part of a character.

    logprob is None for a prompt's first token, which nothing comes before.
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float | None
    rank: int = 0
    top: tuple[TokenLogprob, ...] = ()


@dataclass(slots=True)
class Delta:
    """A piece of a choice. Fields that have nothing new are empty."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    token_ids: tuple[int, ...] = ()
    """All tokens behind this piece, where the request wants them."""
    logprobs: tuple[TokenLogprob, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls or self.token_ids or self.logprobs)


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Message:
    """A whole choice, gathered from its pieces."""

    finish_reason: str = "stop"
    stopped_by: str | int | None = None
    """The stop string or the stop token id, of the request's own, that ended it."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    _texts: list[str] = field(default_factory=list)
    _reasonings: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasonings)

    def add(self, delta: Delta) -> None:
        self._texts.append(delta.text)
        self._reasonings.append(delta.reasoning)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        for piece in delta.tool_calls:
            if piece.index == len(self.tool_calls):
                self.tool_calls.append(ToolCall(piece.id or "", piece.name or "", piece.arguments))
            else:
                self.tool_calls[piece.index].arguments += piece.arguments
