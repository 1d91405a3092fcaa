"""Collects the parsers' results: pieces of answer, reasoning and tool calls, in order."""

from __future__ import annotations

import re
from collections.abc import Callable

from penstock.frontend.parsing.deltas import Delta, ToolCallDelta
from penstock.frontend.parsing.reader import SPACES


class ParsedOutput:
    """Collects pieces. Drops the spaces next to a tool call or the reasoning: they belong to neither text."""

    def __init__(
        self,
        new_call_id: Callable[[], str],
        *,
        includes_reasoning: bool = True,
        includes_content: bool = True,
        max_calls: int,
        strays: tuple[str, ...] = (),
    ) -> None:
        self._new_call_id = new_call_id
        self._includes_reasoning = includes_reasoning
        self._includes_content = includes_content
        self._max_calls = max_calls
        self._num_calls = 0
        self._num_broken = 0
        self._is_calling = False
        self._pieces: list[Delta] = []
        self._content = _EdgeTrimmer()
        self._strays = _Strays(strays)
        self._reasoning = _EdgeTrimmer(is_at_edge=True)
        self.is_reasoning = False
        self.is_complete = False
        """max_calls calls are complete. Everything after them is dropped."""
        self.is_cut = False
        """The text was ended from outside, so that a call may be incomplete."""

    def take(self) -> list[Delta]:
        """Return the pieces since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def content(self, text: str) -> None:
        self._add_content(self._strays.push(text))

    def reasoning(self, text: str) -> None:
        if self._includes_reasoning and (certain := self._reasoning.push(text)):
            self._pieces.append(Delta(reasoning=certain))

    def begin_reasoning(self) -> None:
        self.is_reasoning = True
        self._cut_content()

    def end_reasoning(self) -> None:
        self.is_reasoning = False

    def begin_call(self, name: str) -> None:
        if not self.is_complete:
            self._num_calls += 1
            self._is_calling = True
            self._cut_content()
            self._add_call(call_id=self._new_call_id(), name=name)

    def arguments(self, text: str) -> None:
        if not self.is_complete:
            self._add_call(arguments=text)

    def end_call(self) -> None:
        self._is_calling = False
        self.is_complete = self._num_calls - self._num_broken >= self._max_calls

    def give_back(self, text: str) -> None:
        """Make text that was read as a call content, unchanged. A call that has begun is broken, unless it was cut."""
        if self._is_calling:
            self._is_calling = False
            if self.is_cut:
                self._includes_content = False  # what is left belongs to the call
                return
            self._num_broken += 1
            self._pieces.append(Delta(is_call_broken=True))
            self._content.uncut()
        self.content(text)

    def take_over(self, deltas: list[Delta]) -> None:
        """Add the calls that another output has collected, as the first ones."""
        self._cut_content()
        for call in (call for delta in deltas for call in delta.tool_calls if call.index < self._max_calls):
            self._pieces.append(Delta(tool_calls=(call,)))
            self._num_calls = call.index + 1
        self.end_call()

    def end(self) -> None:
        """End the text: spaces at its end belong to the answer."""
        self._add_content(self._strays.flush())
        if not self.is_complete and (held := self._content.flush()):
            self._pieces.append(Delta(held))

    def _add_content(self, text: str) -> None:
        if text and self._includes_content and not self.is_complete and (certain := self._content.push(text)):
            self._pieces.append(Delta(certain))

    def _cut_content(self) -> None:
        self._add_content(self._strays.flush())
        self._content.cut()

    def _add_call(self, *, arguments: str = "", call_id: str | None = None, name: str | None = None) -> None:
        self._pieces.append(Delta(tool_calls=(ToolCallDelta(self._num_calls - 1, arguments, call_id, name),)))


class _Strays:
    """Drops marks from a text. Holds back what may be the beginning of one."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self._marks = marks
        self._any = re.compile("|".join(map(re.escape, marks)))
        self._held = ""

    def push(self, text: str) -> str:
        if not self._marks:
            return text
        *before, rest = self._any.split(self._held + text)
        longest = len(self._marks[0]) - 1
        tails = (rest[place:] for place in range(max(0, len(rest) - longest), len(rest)))
        self._held = next((tail for tail in tails if any(mark.startswith(tail) for mark in self._marks)), "")
        return "".join((*before, rest[: len(rest) - len(self._held)]))

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class _EdgeTrimmer:
    """Drops spaces at the edges of a text: next to a call or the reasoning.

    Spaces are held back until the text that follows shows whether they are at an edge.
    """

    def __init__(self, *, is_at_edge: bool = False) -> None:
        self._is_at_edge = is_at_edge
        self._has_text = False
        self._held: list[str] = []
        """Spaces after the last text."""
        self._gap: list[str] = []
        """Spaces after an edge. Used between two texts if there were no spaces before the edge."""
        self._before_cut = (is_at_edge, [""])

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
            # Keep spaces between the words before and after a call.
            spaces = (self._held or self._gap) if self._has_text else []
        trimmed = "".join((*spaces, certain))
        trailing = text[num_certain:]
        self._held = [trailing] if trailing else []
        self._is_at_edge, self._has_text = False, True
        return trimmed

    def cut(self) -> None:
        """Mark an edge here."""
        self._before_cut = self._is_at_edge, self._gap.copy()
        self._is_at_edge = True
        self._gap.clear()

    def uncut(self) -> None:
        """Undo the last cut."""
        self._is_at_edge, self._gap = self._before_cut

    def flush(self) -> str:
        return "" if self._is_at_edge else "".join(self._held)
