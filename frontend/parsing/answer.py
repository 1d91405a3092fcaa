"""The parser of one choice: its reasoning, then its tool calls and text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.frontend.parsing.parsed_output import ParsedOutput
from penstock.frontend.parsing.reader import Reader, Reading
from penstock.frontend.parsing.reasoning import ReasoningFormat, read_reasoning

if TYPE_CHECKING:
    from penstock.frontend.parsing.deltas import Delta
    from penstock.frontend.parsing.tool_formats.base import ToolFormat

_MANY_CALLS = 1 << 20


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """What one request's answers may consist of. Called, it makes the parser of one answer."""

    reasoning: ReasoningFormat | None = None
    is_reasoning_open: bool = False
    """The prompt ends where the reasoning begins."""
    tells_reasoning: bool = True
    tools: ToolFormat | None = None
    function_names: frozenset[str] = frozenset()
    one_call: bool = False
    """The answer ends with its first call."""

    def __call__(self) -> AnswerParser:
        return AnswerParser(self)


class AnswerParser:
    """See `penstock.frontend.generation.choice.OutputParser`."""

    def __init__(self, shape: AnswerShape) -> None:
        new_call_id = shape.tools.new_call_id if shape.tools is not None else str
        self._output = ParsedOutput(
            new_call_id, tells_reasoning=shape.tells_reasoning, max_calls=1 if shape.one_call else _MANY_CALLS
        )
        self._reader = Reader()
        self._output.is_reasoning = shape.is_reasoning_open
        self._reading = _read(self._reader, self._output, shape)

    @property
    def is_reasoning(self) -> bool:
        return self._output.is_reasoning

    @property
    def is_complete(self) -> bool:
        return self._output.is_complete

    def push(self, text: str) -> list[Delta]:
        self._reader.push(text)
        next(self._reading, None)
        return self._output.take()

    def flush(self) -> list[Delta]:
        self._reader.end()
        next(self._reading, None)
        return self._output.take()


def _read(reader: Reader, output: ParsedOutput, shape: AnswerShape) -> Reading[None]:
    if shape.reasoning is not None:
        yield from read_reasoning(reader, output, shape.reasoning, is_open=shape.is_reasoning_open)
    if shape.tools is not None:
        yield from shape.tools.read(reader, output, shape.function_names)
    yield from reader.rest(output.content)
    output.end()
