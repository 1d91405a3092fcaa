"""What comes out of a choice: piece by piece as it streams, and whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from penstock.frontend.parsing.blocks import BlockKind, OutputBlocks

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


class ScoredToken(NamedTuple):
    """One token as answers report it. raw is its text in bytes, which may be a part of a character.

    logprob is None for a prompt's first token, which nothing comes before.
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float | None
    rank: int = 0
    top: tuple[ScoredToken, ...] = ()
    offset: int = 0
    """Where it begins in the choice's text, in characters."""


@dataclass(slots=True)
class Delta:
    """A piece of a choice. Fields that have nothing new are empty."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    token_ids: tuple[int, ...] = ()
    """All tokens behind this piece, where the request wants them."""
    logprobs: tuple[ScoredToken, ...] = ()
    parts: tuple[Delta, ...] = ()
    """The same one after the other, where it is of several kinds."""

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.tool_calls or self.token_ids or self.logprobs)


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ChoiceOutput:
    """A whole choice, gathered from its pieces."""

    finish_reason: str = "stop"
    stopped_by: str | int | None = None
    """The stop string or the stop token id, of the request's own, that ended it."""
    blocks: OutputBlocks = field(default_factory=OutputBlocks)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[ScoredToken] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[ScoredToken] | None = None

    @property
    def text(self) -> str:
        return self._joined(BlockKind.TEXT)

    @property
    def reasoning(self) -> str:
        return self._joined(BlockKind.REASONING)

    @property
    def tool_calls(self) -> list[ToolCall]:
        calls = (block for block in self.blocks.all if block.kind is BlockKind.CALL)
        return [ToolCall(block.call_id, block.name, block.text) for block in calls]

    def add(self, delta: Delta) -> None:
        self.blocks.take(delta)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)

    def _joined(self, kind: BlockKind) -> str:
        return "".join(piece for block in self.blocks.all if block.kind is kind for piece in block.pieces)
