"""The parser of one choice: reads its reasoning, then its text and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.frontend.parsing.deltas import Delta
from penstock.frontend.parsing.drafts import ReasoningText
from penstock.frontend.parsing.harmony import HARMONY, Harmony, read_messages
from penstock.frontend.parsing.parsed_output import ParsedOutput
from penstock.frontend.parsing.reader import Reader, Reading
from penstock.frontend.parsing.reasoning import ReasoningFormat, read_reasoning
from penstock.frontend.parsing.tool_formats.base import Functions, ToolFormat

_UNLIMITED_CALLS = 1 << 20


@dataclass(frozen=True, slots=True)
class AnswerShape:
    """The parts that the answers to one request may have."""

    reasoning: ReasoningFormat | None = None
    is_reasoning_open: bool = False
    """The prompt already contains the marker that opens the reasoning."""
    includes_reasoning: bool = True
    """Report reasoning to the client; False drops it."""
    tools: ToolFormat | None = None
    functions: Functions = field(default_factory=dict)
    calls_only: bool = False
    """The answer consists of calls: any text beside them belongs to a call that was cut off, and is dropped."""
    single_call: bool = False
    """The first call ends the answer."""

    def new_parser(self) -> AnswerParser:
        return AnswerParser(self)


class AnswerParser:
    """Sorts the text of one choice into answer, reasoning and tool calls.

    Any split of the text into pieces gives the same deltas when joined.
    """

    def __init__(self, shape: AnswerShape) -> None:
        new_call_id = shape.tools.new_call_id if shape.tools is not None else str
        self._output = ParsedOutput(
            new_call_id,
            includes_reasoning=shape.includes_reasoning,
            includes_content=not shape.calls_only,
            max_calls=1 if shape.single_call else _UNLIMITED_CALLS,
            strays=() if shape.reasoning is None else shape.reasoning.strays,
        )
        self._reader = Reader()
        self._output.is_reasoning = shape.is_reasoning_open
        self._reading = _read(self._reader, self._output, shape)

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within the reasoning."""
        return self._output.is_reasoning

    @property
    def is_complete(self) -> bool:
        """Whether the answer is over, even if the model goes on."""
        return self._output.is_complete

    def push(self, text: str) -> list[Delta]:
        self._reader.push(text)
        next(self._reading, None)
        return self._output.take()

    def flush(self, *, was_cut: bool = False) -> list[Delta]:
        """End the text. Return what was held back. was_cut: the model did not end it itself."""
        self._output.is_cut = was_cut
        self._reader.end()
        next(self._reading, None)
        return self._output.take()


def _read(reader: Reader, output: ParsedOutput, shape: AnswerShape) -> Reading[None]:
    if shape.reasoning is HARMONY:
        functions = shape.functions if isinstance(shape.tools, Harmony) else None
        yield from read_messages(reader, output, functions, is_open=shape.is_reasoning_open)
    elif shape.reasoning is not None:
        yield from read_reasoning(
            reader, output, shape.reasoning, _text_of(output, shape), is_open=shape.is_reasoning_open
        )
    if shape.tools is not None:
        yield from shape.tools.read(reader, output, shape.functions)
    yield from reader.rest(output.content)
    output.end()


def _text_of(output: ParsedOutput, shape: AnswerShape) -> ReasoningText:
    """Return the receiver of the reasoning, which knows the calls that the answer may have."""
    if shape.tools is None:
        return ReasoningText(output, (), None)
    calls = AnswerShape(tools=shape.tools, functions=shape.functions)
    return ReasoningText(output, shape.tools.triggers, calls.new_parser)
