"""Finds the marks of a model's reasoning: what its chat template writes around a known thought."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.frontend.parsing.reasoning import KNOWN_FORMATS, ReasoningFormat
from penstock.frontend.parsing.rendered import NAMES, NUMBER, TEXT, THOUGHT, Renderings, calls_of, common_start
from penstock.frontend.parsing.tool_formats.marked import is_mark, pieces


def find_reasoning(renderings: Renderings) -> ReasoningFormat | None:
    """Return the format of the reasoning that the template writes; None if it writes none between marks."""
    plain, prompt = renderings.turn(TEXT) or "", renderings.prompt() or ""
    for end, turn in (
        (TEXT, renderings.turn(TEXT, thought=THOUGHT)),
        (NAMES[0], renderings.turn(None, calls_of(NUMBER, 1), thought=THOUGHT)),
    ):
        before, has_thought, behind = (turn or "").partition(THOUGHT)
        between, has_end, after = behind.partition(end)
        if has_thought and has_end:
            break
    else:
        return None
    start = min(len(common_start(before, other)) for other in (plain, prompt))
    opening, closing = before[start:].strip(), pieces(between)
    if not is_mark(opening):
        # The prompt has the opening too, or its first mark.
        last = (before[:start].splitlines() or [""])[-1].strip()
        marks = list(filter(is_mark, pieces(last)))
        opening = f"{marks[-1]}{opening}" if marks else last
    if not opening or not any(map(is_mark, closing)):
        return None
    num_marks = min(len(pieces(opening)), len(closing)) if is_mark(opening) else 1
    place = 0
    for piece in closing[:num_marks]:
        place = between.index(piece, place) + len(piece)
    closing_text = between[:place].strip()
    lead = between[place:]
    if end != TEXT:
        lead, _, after = plain[len(common_start(plain, prompt)) :].partition(TEXT)
        lead = lead.rpartition(closing_text)[2]
    return _known(opening, closing_text, _answer_tags(lead, after))


def _answer_tags(opening: str, after: str) -> tuple[str, str] | None:
    """Return the marks around an answer, if there are any."""
    if not any(map(is_mark, pieces(opening))):
        return None
    marks = list(filter(is_mark, pieces(after)))
    return opening.strip(), marks[0] if len(marks) > 1 else ""


def _known(opening: str, closing: str, tags: tuple[str, str] | None) -> ReasoningFormat:
    for form in KNOWN_FORMATS:
        if (form.opening, form.closing, form.answer_tags) == (opening, closing, tags):
            return form
    return ReasoningFormat(opening, opening, closing, answer_tags=tags)
