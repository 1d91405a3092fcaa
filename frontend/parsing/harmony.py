"""The messages in which gpt-oss answers: reasoning, calls and text in channels of their own.

The layout is <|start|>role<|channel|>channel to=recipient <|constrain|>type<|message|>text<|end|>; the prompt ends with
the first <|start|> and its role. See https://github.com/openai/harmony/blob/main/docs/format.md.
"""

from __future__ import annotations

import re

from penstock.frontend.parsing.parsed_output import ParsedOutput
from penstock.frontend.parsing.reader import Malformed, Reader, Reading
from penstock.frontend.parsing.reasoning import ReasoningFormat
from penstock.frontend.parsing.tool_formats.base import (
    Functions,
    MessageLayout,
    ToolFormat,
    is_function_name,
    read_arguments,
)

CHANNEL = "<|channel|>"
_START, _CONSTRAIN, _MESSAGE, _END, _CALL = "<|start|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>"
_ENDS = (_END, _CALL, "<|return|>")
_MARKERS = (CHANNEL, _START, _CONSTRAIN, _MESSAGE, *_ENDS)
_ASSISTANT = f"{_START}assistant"
_FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"\bto=(\S+)")

HARMONY = ReasoningFormat(
    "harmony",
    f"{CHANNEL}analysis{_MESSAGE}",
    _END,
    tokens=_MARKERS,
    line_break="",
    follow=_ASSISTANT,
    answer_opening=f"{CHANNEL}final{_MESSAGE}",
)


class Harmony(ToolFormat):
    """The model ends its answer with a call to wait for the result, so an answer has only one."""

    name = "harmony"
    markers: tuple[str, ...] = _MARKERS
    trigger: str | None = None
    opening = ""
    separator = f"{_CALL}{_ASSISTANT}"
    closing = ""
    max_calls = 1
    messages: MessageLayout | None = MessageLayout(
        tuple(f"{CHANNEL}{channel}{_MESSAGE}" for channel in ("analysis", "commentary", "final")),
        separator=f"{_END}{_ASSISTANT}",
    )

    def around(self, name: str) -> tuple[str, str]:
        return f"{CHANNEL}commentary to={_FUNCTIONS}{name} {_CONSTRAIN}json{_MESSAGE}", ""

    def read(self, reader: Reader, output: ParsedOutput, functions: Functions) -> Reading[None]:
        yield from read_messages(reader, output, functions, reasons=False)


def read_messages(
    reader: Reader, output: ParsedOutput, functions: Functions | None, *, reasons: bool = True, is_open: bool = False
) -> Reading[None]:
    """Read an answer. Text outside of messages is content.

    Markers, and a header that is cut off, are never content. functions is None if there are no calls; a call's
    arguments are then content. If reasons is False, the analysis is content too. is_open: the prompt ends within the
    analysis.
    """
    messages = _Messages(reader, output, functions, reasons=reasons)
    if is_open:
        yield from messages.read_analysis()
    elif (yield from reader.accept(" to=")):
        yield from messages.read_message(" to=")
    while (yield from messages.read_text()):
        yield from messages.read_message("")


class _Messages:
    def __init__(self, reader: Reader, output: ParsedOutput, functions: Functions | None, *, reasons: bool) -> None:
        self._reader = reader
        self._output = output
        self._functions = functions
        self._reasons = reasons
        self._has_reasoned = False
        self._has_text = False

    def read_text(self) -> Reading[bool]:
        """Read text up to a marker. Return False if the answer ends before that."""
        return (yield from self._reader.until_any(_MARKERS, self._output.content)) is not None

    def read_message(self, header: str) -> Reading[None]:
        """Read the rest of a message with this header, or the next marker if that starts no message."""
        for end in _ENDS:
            if (yield from self._reader.accept(end)):
                yield from self._reader.skip_spaces()
                return
        parts = [header]
        while (marker := (yield from self._reader.until_any(_MARKERS, parts.append))) is not None:
            yield from self._reader.accept(marker)
            if marker == _MESSAGE:
                yield from self._read_body("".join(parts))
                return
            parts.append(f" {marker}" if marker == CHANNEL else " ")

    def read_analysis(self) -> Reading[None]:
        output = self._output
        if not self._reasons:
            yield from self._read_content()
            return
        output.begin_reasoning()
        if self._has_reasoned:
            output.reasoning("\n\n")
        self._has_reasoned = True
        yield from self._reader.until_any(_MARKERS, output.reasoning)
        output.end_reasoning()

    def _read_body(self, header: str) -> Reading[None]:
        channel = header.rpartition(CHANNEL)[2].split(maxsplit=1)[:1]
        recipient = _RECIPIENT.search(header)
        name = "" if recipient is None else recipient[1].removeprefix(_FUNCTIONS)
        if self._functions is not None and is_function_name(name):
            yield from self._read_call(name)
        elif channel == ["analysis"]:
            yield from self.read_analysis()
        else:
            yield from self._read_content()

    def _read_call(self, name: str) -> Reading[None]:
        reader, output = self._reader, self._output
        reader.hold()
        try:
            yield from reader.skip_spaces()
            if (yield from reader.peek()) != "{":
                raise Malformed
            yield from read_arguments(reader, output, name)
            yield from reader.skip_spaces()
        except Malformed:
            output.give_back(reader.release())
        else:
            output.end_call()
            reader.release()

    def _read_content(self) -> Reading[None]:
        if self._has_text:
            self._output.content("\n\n")
        self._has_text = True
        yield from self.read_text()
