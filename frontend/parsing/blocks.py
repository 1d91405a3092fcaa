"""The whole output of a choice, as a list of blocks: reasoning, text and tool calls, in order."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

from penstock.frontend.parsing.deltas import Delta, ScoredToken, ToolCallDelta


class BlockKind(enum.Enum):
    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()


@dataclass(slots=True)
class OutputBlock:
    """One block. In a tool call, text is the call's arguments."""

    index: int
    kind: BlockKind
    call_id: str = ""
    name: str = ""
    logprobs: list[ScoredToken] = field(default_factory=list)
    """Log probabilities of the tokens of a text block."""
    pieces: list[str] = field(default_factory=list)
    is_broken: bool = False
    """The call was none. Only a stream, which cannot take it back, keeps such a block."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class BlockEvents(Protocol):
    """Writes the stream events for what happens to a block."""

    def opened(self, block: OutputBlock) -> bytes: ...

    def grown(self, block: OutputBlock, piece: str, logprobs: tuple[ScoredToken, ...]) -> bytes: ...

    def closed(self, block: OutputBlock) -> bytes: ...


class _NoEvents:
    """Writes nothing: for an answer that is not streamed."""

    def opened(self, block: OutputBlock) -> bytes:  # noqa: ARG002
        return b""

    def grown(self, block: OutputBlock, piece: str, logprobs: tuple[ScoredToken, ...]) -> bytes:  # noqa: ARG002
        return b""

    def closed(self, block: OutputBlock) -> bytes:  # noqa: ARG002
        return b""


_NO_EVENTS = _NoEvents()


class OutputBlocks:
    """Collects the pieces of one choice. A block is complete when a piece of another kind, or another call, arrives."""

    def __init__(self, events: BlockEvents = _NO_EVENTS) -> None:
        self.all: list[OutputBlock] = []
        self.current: OutputBlock | None = None
        """The open block, if any: the last of `all`."""
        self._events = events
        self._pending_logprobs: tuple[ScoredToken, ...] = ()
        """Log probabilities of tokens whose text is held back."""

    def take(self, delta: Delta) -> bytes:
        """Add a piece. Return its stream events."""
        if not delta.parts:
            return self._take(delta)
        return b"".join(map(self._take, delta.parts))

    def _take(self, part: Delta) -> bytes:
        events = b""
        if part.is_call_broken:
            events += self._break_call()
        if part.reasoning:
            events += self._add(BlockKind.REASONING, part.reasoning)
        elif part.text:
            logprobs, self._pending_logprobs = self._pending_logprobs + part.logprobs, ()
            events += self._add(BlockKind.TEXT, part.text, logprobs)
        elif self.current is None or self.current.kind is BlockKind.TEXT:
            self._pending_logprobs += part.logprobs
        for piece in part.tool_calls:
            events += self._add_call_piece(piece)
        return events

    def begin(self, kind: BlockKind, call_id: str = "", name: str = "") -> bytes:
        """Close the open block and open the next one. Return the stream events.

        Pending log probabilities are dropped: the text that was held back was a marker between the blocks.
        """
        self._pending_logprobs = ()
        events = self.close()
        self.current = OutputBlock(len(self.all), kind, call_id, name)
        self.all.append(self.current)
        return events + self._events.opened(self.current)

    def close(self) -> bytes:
        """Close the open block, if there is one. Return the stream events."""
        current, self.current = self.current, None
        if current is None:
            return b""
        if current.kind is BlockKind.TEXT:
            current.logprobs += self._pending_logprobs
        self._pending_logprobs = ()
        return self._events.closed(current)

    def _break_call(self) -> bytes:
        """Drop the open call. A stream cannot take it back, so there it is closed."""
        if self._events is not _NO_EVENTS:
            self.all[-1].is_broken = True
            return self.close()
        self.all.pop()
        self.current = self.all[-1] if self.all else None
        return b""

    def _add(self, kind: BlockKind, text: str, logprobs: tuple[ScoredToken, ...] = ()) -> bytes:
        current = self.current
        if current is not None and current.kind is kind:
            return self._grow(current, text, logprobs)
        events = self.begin(kind)
        return events + self._grow(self.all[-1], text, logprobs)

    def _add_call_piece(self, piece: ToolCallDelta) -> bytes:
        if piece.id is not None:
            events = self.begin(BlockKind.CALL, piece.id, piece.name or "")
            return events + self._grow(self.all[-1], piece.arguments) if piece.arguments else events
        if self.current is None:
            raise ValueError(f"a piece of call {piece.index} arrived after the call was closed")
        return self._grow(self.current, piece.arguments)

    def _grow(self, block: OutputBlock, text: str, logprobs: tuple[ScoredToken, ...] = ()) -> bytes:
        block.pieces.append(text)
        block.logprobs += logprobs
        return self._events.grown(block, text, logprobs)


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ChoiceOutput:
    """A whole choice."""

    finish_reason: str = "stop"
    stopped_by: str | int | None = None
    """The request's stop string or stop token id that ended the text."""
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
