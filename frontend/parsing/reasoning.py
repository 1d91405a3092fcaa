"""Reasoning, which a model writes before its answer, between two markers."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.frontend.parsing.drafts import ReasoningText
from penstock.frontend.parsing.parsed_output import ParsedOutput
from penstock.frontend.parsing.reader import Reader, Reading


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    name: str
    opening: str
    closing: str
    tokens: tuple[str, ...] = ()
    """Texts of the layout that are tokens of their own in most models; default: the two markers."""
    line_break: str = "\n"
    """After the opening marker, if the server writes it."""
    follow: str = "\n\n"
    """After the closing marker, if the server writes it."""
    answer_opening: str = ""
    """Precedes an answer's text, whether there was reasoning or not."""
    answer_tags: tuple[str, str] | None = None
    """Tags that may enclose the answer after the reasoning. They are not part of it."""
    turn_end: str = ""
    """May follow the last of the tags."""
    spellings: tuple[tuple[str, str], ...] = ()
    """Other pairs of markers that models write."""
    strays: tuple[str, ...] = ()
    """Marks around nothing that models write beside an answer, the longest first. They are not part of it."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts any of which may be a special token."""
        return self.tokens or (self.opening, self.closing)

    @property
    def empty(self) -> str:
        """Empty reasoning, with the text that follows it."""
        return f"{self.opening}{self.line_break * 2}{self.closing}{self.follow}"


THINK = ReasoningFormat("think", "<think>", "</think>")
"""Used by Qwen3, DeepSeek, GLM and many others."""
MISTRAL_THINK = ReasoningFormat("mistral", "[THINK]", "[/THINK]")
"""Used by Magistral."""
_NO_THOUGHT = "<|channel>thought\n<channel|>"
GEMMA_THOUGHT = ReasoningFormat(
    "gemma",
    "<|channel>thought",
    "<channel|>",
    tokens=("<|channel>", "<channel|>"),
    follow="",
    strays=(f"<|channel>{_NO_THOUGHT}", _NO_THOUGHT, "<channel|>"),
)
"""Used by Gemma 4."""
GRANITE_PHRASES = ReasoningFormat(
    "granite",
    "Here is my thought process:",
    "Here is my response:",
    spellings=(("Here's my thought process:", "Here's my response:"),),
)
"""Used by Granite 3.2."""
GRANITE_TAGS = ReasoningFormat("granite", "<think>", "</think>", answer_tags=("<response>", "</response>"))
"""Used by Granite 3.3."""

KNOWN_FORMATS = (GRANITE_TAGS, GRANITE_PHRASES, THINK, MISTRAL_THINK, GEMMA_THOUGHT)


def read_reasoning(
    reader: Reader, output: ParsedOutput, form: ReasoningFormat, text: ReasoningText, *, is_open: bool
) -> Reading[None]:
    """Read the reasoning at the start of an answer. Later markers are text. The reasoning may never end.

    text receives the reasoning. is_open: the prompt ends with the opening marker. Some models write it once more.
    """
    markers = ((form.opening, form.closing), *form.spellings)
    reader.hold()
    yield from reader.skip_spaces()
    is_opened = False
    for opening, _ in markers:
        is_opened = is_opened or (yield from reader.accept(opening))
    is_ended = not (is_open or is_opened) and (yield from reader.accept(form.closing))
    held = "" if is_ended else reader.release()
    if is_open or is_opened:
        output.begin_reasoning()
        # The answer may begin without the end of the reasoning.
        ends = (*(closing for _, closing in markers), *(form.answer_tags or ())[:1])
        end = yield from reader.until_any(ends, text.push)
        text.end(ends_answer=end is None and not output.is_cut)
        for _, closing in markers:
            yield from reader.accept(closing)
        output.end_reasoning()
        held = ""
    if form.answer_tags is not None:
        yield from _read_tagged_answer(reader, output, form, held)
    else:
        output.content(held)


def _read_tagged_answer(reader: Reader, output: ParsedOutput, form: ReasoningFormat, held: str) -> Reading[None]:
    """Read the text between the tags, if the first of them comes next. held is text before it."""
    opening, closing = form.answer_tags or ("", "")
    reader.hold()
    yield from reader.skip_spaces()
    # Without reasoning, the answer may have only the last of several opening marks.
    is_opened = False
    for place in range(len(opening)):
        if not is_opened and (place == 0 or opening[place] == "<" or opening[place - 1] in " >"):
            is_opened = yield from reader.accept(opening[place:])
    if not is_opened:
        output.content(held + reader.release())
        return
    reader.release()
    if closing:
        yield from reader.until(closing, output.content, keeps_partial=False)
        yield from reader.accept(closing)
        yield from reader.accept(form.turn_end)
