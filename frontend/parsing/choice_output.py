"""The whole output of a choice, collected from its pieces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.frontend.parsing.blocks import BlockKind, OutputBlocks

if TYPE_CHECKING:
    from penstock.frontend.parsing.deltas import Delta, ScoredToken


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
