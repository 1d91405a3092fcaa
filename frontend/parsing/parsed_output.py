"""Where readings put what they find: pieces of answer, reasoning and tool calls, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.frontend.parsing.deltas import Delta, ToolCallDelta
from penstock.frontend.parsing.reader import SPACES

if TYPE_CHECKING:
    from collections.abc import Callable


class ParsedOutput:
    """Spaces that stand beside a tool call or the reasoning are nobody's text, and are dropped."""

    def __init__(self, new_call_id: Callable[[], str], *, tells_reasoning: bool = True, max_calls: int) -> None:
        self._new_call_id = new_call_id
        self._tells_reasoning = tells_reasoning
        self._max_calls = max_calls
        self._num_calls = 0
        self._pieces: list[Delta] = []
        self._content = _Trimmed()
        self._reasoning = _Trimmed(is_at_edge=True)
        self.is_reasoning = False
        self.is_complete = False
        """As many calls as are wanted have been made; what comes afterwards is dropped."""

    def take(self) -> list[Delta]:
        """The pieces since the last time."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def content(self, text: str) -> None:
        if not self.is_complete and (certain := self._content.push(text)):
            self._pieces.append(Delta(certain))

    def reasoning(self, text: str) -> None:
        if self._tells_reasoning and (certain := self._reasoning.push(text)):
            self._pieces.append(Delta(reasoning=certain))

    def begin_reasoning(self) -> None:
        self.is_reasoning = True
        self._content.cut()

    def end_reasoning(self) -> None:
        self.is_reasoning = False

    def begin_call(self, name: str) -> None:
        self.is_complete = self._num_calls >= self._max_calls  # also where the last one broke off
        if not self.is_complete:
            self._num_calls += 1
            self._content.cut()
            self._add_call(call_id=self._new_call_id(), name=name)

    def arguments(self, text: str) -> None:
        if not self.is_complete:
            self._add_call(arguments=text)

    def end_call(self) -> None:
        self.is_complete = self._num_calls >= self._max_calls

    def end(self) -> None:
        """The text has ended."""
        if not self.is_complete and (held := self._content.flush()):
            self._pieces.append(Delta(held))

    def _add_call(self, *, arguments: str = "", call_id: str | None = None, name: str | None = None) -> None:
        self._pieces.append(Delta(tool_calls=(ToolCallDelta(self._num_calls - 1, arguments, call_id, name),)))


class _Trimmed:
    """Holds spaces back until it is known what they stand beside."""

    def __init__(self, *, is_at_edge: bool = False) -> None:
        self._is_at_edge = is_at_edge
        self._has_said = False
        self._held: list[str] = []
        self._gap: list[str] = []
        """Spaces behind an edge, for what was held before it where that is nothing."""

    def push(self, text: str) -> str:
        certain = text.rstrip(SPACES)
        num_certain = len(certain)
        if not certain:
            (self._gap if self._is_at_edge else self._held).append(text)
            return ""
        spaces = self._held
        if self._is_at_edge:
            stripped = certain.lstrip(SPACES)
            self._gap.append(certain[: len(certain) - len(stripped)])
            certain = stripped
            # Words on both sides of a call stay apart.
            spaces = (self._held or self._gap) if self._has_said else []
        told = "".join((*spaces, certain))
        behind = text[num_certain:]
        self._held = [behind] if behind else []
        self._is_at_edge, self._has_said = False, True
        return told

    def cut(self) -> None:
        """Something else stands here."""
        self._is_at_edge = True
        self._gap.clear()

    def flush(self) -> str:
        return "" if self._is_at_edge else "".join(self._held)
