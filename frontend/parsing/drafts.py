"""Tool calls within reasoning that is never closed.

Some models go from their reasoning straight to a call. Others draft calls while they reason. A call counts if it is
complete and the answer ends with it; a draft that anything follows is reasoning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.frontend.parsing.deltas import Delta
from penstock.frontend.parsing.parsed_output import ParsedOutput


class CallParser(Protocol):
    """A parser of an answer of calls."""

    def push(self, text: str) -> list[Delta]: ...

    def flush(self) -> list[Delta]: ...


class ReasoningText:
    """Passes reasoning on to the output, and holds back what may be the answer's calls."""

    def __init__(
        self, output: ParsedOutput, triggers: tuple[str, ...], new_parser: Callable[[], CallParser] | None
    ) -> None:
        """triggers are the texts that begin a call. new_parser is None if the answer can have none."""
        self._output = output
        self._triggers = triggers if new_parser is not None else ()
        self._new_parser = new_parser
        self._held = ""
        """The beginning of a trigger."""
        self._parser: CallParser | None = None
        """Reads the draft."""
        self._draft: list[str] = []
        """The text of a call, from its trigger on."""
        self._calls: list[Delta] = []

    def push(self, text: str) -> None:
        if not self._triggers:
            self._output.reasoning(text)
            return
        position = 0
        while position < len(text):
            if not self._held and self._parser is None:  # most of the text is no trigger
                starts = (text.find(trigger[0], position) for trigger in self._triggers)
                start = min((start for start in starts if start >= 0), default=len(text))
                self._output.reasoning(text[position:start])
                position = start
            # One by one: the end of a draft must not depend on how the text arrives.
            character = text[position : position + 1]
            position += 1
            if self._parser is not None:
                self._draft.append(character)
                self._take(self._parser.push(character))
                continue
            self._held += character
            if self._held in self._triggers and self._new_parser is not None:
                self._parser, self._draft, self._held = self._new_parser(), [self._held], ""
                self._take(self._parser.push(self._draft[0]))
            else:
                self._release(self._held)

    def end(self, *, ends_answer: bool) -> None:
        """End the reasoning. ends_answer: the model has ended its answer too."""
        if self._parser is not None and ends_answer:
            self._take(self._parser.flush())
        if self._parser is not None and ends_answer and self._calls:
            self._output.end_reasoning()
            self._output.take_over(self._calls)
        else:
            self._output.reasoning("".join((self._held, *self._draft)))
        self._held, self._draft = "", []

    def _take(self, deltas: list[Delta]) -> None:
        self._calls += deltas
        if any(delta.text for delta in deltas):
            text = "".join(self._draft)
            self._parser, self._calls, self._draft = None, [], []
            self._release(text)

    def _release(self, held: str) -> None:
        """Pass on what cannot be the beginning of a trigger."""
        longest = max(map(len, self._triggers)) - 1
        start = max(0, len(held) - longest)
        tails = (held[place:] for place in range(start, len(held)))
        self._held = next((tail for tail in tails if any(t.startswith(tail) for t in self._triggers)), "")
        self._output.reasoning(held[: len(held) - len(self._held)])
