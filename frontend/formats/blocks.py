"""An answer as a row of blocks: reasoning, text and tool calls, one after the other. Two APIs tell answers so."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from frontend.deltas import Delta, ToolCallDelta

if TYPE_CHECKING:
    from frontend.deltas import Message, TokenLogprob


class BlockKind(enum.Enum):
    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()


@dataclass(slots=True)
class Block:
    """text is a call's arguments where it is a call."""

    index: int
    kind: BlockKind
    call_id: str = ""
    name: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class BlockEvents(Protocol):
    """How an API tells what happens to a block."""

    def opened(self, block: Block) -> bytes: ...

    def grown(self, block: Block, piece: str, logprobs: tuple[TokenLogprob, ...]) -> bytes: ...

    def closed(self, block: Block) -> bytes: ...


class Blocks:
    """Gathers one choice's pieces and has each change told. Within a piece reasoning comes first and calls last."""

    def __init__(self, events: BlockEvents) -> None:
        self.all: list[Block] = []
        self.current: Block | None = None
        """The one that may grow; it is the last of all."""
        self._events = events
        self._untold: tuple[TokenLogprob, ...] = ()
        """Log probabilities of tokens whose text is being held back."""

    def take(self, delta: Delta) -> bytes:
        current = self.current
        if delta.text and not (delta.reasoning or delta.tool_calls or delta.logprobs or self._untold):
            return self._add(BlockKind.TEXT, delta.text)
        calls, events = delta.tool_calls, b""
        while calls and calls[0].id is None and current is not None:
            events += self._grow(current, calls[0].arguments)
            calls = calls[1:]
        if delta.reasoning:
            self._untold = ()
            events += self._add(BlockKind.REASONING, delta.reasoning)
        elif current is None or current.kind is BlockKind.TEXT or delta.text:
            self._untold += delta.logprobs
        if delta.text:
            told, self._untold = self._untold, ()
            events += self._add(BlockKind.TEXT, delta.text, told)
        for piece in calls:
            events += self._call(piece)
        return events

    def begin(self, kind: BlockKind, call_id: str = "", name: str = "") -> bytes:
        """The next block; the one before is complete."""
        events = self.close()
        self.current = Block(len(self.all), kind, call_id, name)
        self.all.append(self.current)
        return events + self._events.opened(self.current)

    def close(self) -> bytes:
        """The block that is open, if one is, is complete."""
        current, self.current = self.current, None
        if current is None:
            return b""
        if current.kind is BlockKind.TEXT:
            current.logprobs += self._untold
            self._untold = ()
        return self._events.closed(current)

    def _add(self, kind: BlockKind, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> bytes:
        current = self.current
        if current is not None and current.kind is kind:
            return self._grow(current, text, logprobs)
        events = self.begin(kind)
        return events + self._grow(self.all[-1], text, logprobs)

    def _call(self, piece: ToolCallDelta) -> bytes:
        if piece.id is not None:
            events = self.begin(BlockKind.CALL, piece.id, piece.name or "")
            return events + self._grow(self.all[-1], piece.arguments) if piece.arguments else events
        if self.current is None:
            raise ValueError(f"a piece of call {piece.index} came when the call was no longer open")
        return self._grow(self.current, piece.arguments)

    def _grow(self, block: Block, text: str, logprobs: tuple[TokenLogprob, ...] = ()) -> bytes:
        block.pieces.append(text)
        block.logprobs += logprobs
        return self._events.grown(block, text, logprobs)


def whole_pieces(message: Message, num_reasoning_tokens: int) -> list[Delta]:
    """A whole choice, to be taken by Blocks."""
    calls = (ToolCallDelta(index, call.arguments, call.id, call.name) for index, call in enumerate(message.tool_calls))
    logprobs = message.logprobs[num_reasoning_tokens:]
    if message.tool_calls:
        logprobs = _of_text(message.text, logprobs)
    answer = Delta(message.text, tool_calls=tuple(calls), logprobs=tuple(logprobs))
    return [Delta(reasoning=message.reasoning), answer]


def _of_text(text: str, logprobs: list[TokenLogprob]) -> list[TokenLogprob]:
    """Those of the tokens that the text consists of: the calls' tokens come after them."""
    missing = len(text)
    told: list[TokenLogprob] = []
    for entry in logprobs:
        if missing <= 0:
            break
        told.append(entry)
        missing -= len(entry.text)
    return told
