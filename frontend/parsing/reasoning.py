"""Reasoning, which a model writes before its answer, between two markers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.frontend.parsing.parsed_output import ParsedOutput
    from penstock.frontend.parsing.reader import Reader, Reading


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    name: str
    opening: str
    closing: str

    @property
    def markers(self) -> tuple[str, ...]:
        """Both markers, either of which may be a special token."""
        return (self.opening, self.closing)


THINK = ReasoningFormat("think", "<think>", "</think>")
"""Used by Qwen3, DeepSeek-R1 and many others."""
MISTRAL_THINK = ReasoningFormat("mistral", "[THINK]", "[/THINK]")
"""Used by Magistral."""


def read_reasoning(reader: Reader, output: ParsedOutput, form: ReasoningFormat, *, is_open: bool) -> Reading[None]:
    """Read the reasoning at the start of an answer. Later markers are text. The reasoning may never end.

    is_open: the prompt ends with the opening marker. Some models write it once more.
    """
    reader.hold()
    yield from reader.skip_spaces()
    is_opened = yield from reader.accept(form.opening)
    held = reader.release()
    if not (is_open or is_opened):
        output.content(held)
        return
    output.begin_reasoning()
    yield from reader.until(form.closing, output.reasoning)
    yield from reader.accept(form.closing)
    output.end_reasoning()
