"""Finds the marks of a model's reasoning: what its chat template writes around a known thought."""

from __future__ import annotations

from penstock.frontend.parsing.reasoning import KNOWN_FORMATS, ReasoningFormat
from penstock.frontend.parsing.syntax.rendered import NAMES, NUMBER, TEXT, THOUGHT, Renderings, calls_of, common_start
from penstock.frontend.parsing.tool_formats.marked import inner_end, is_mark, pieces


def find_reasoning(renderings: Renderings) -> ReasoningFormat | None:
    """Return the format of the reasoning that the template writes; None if it writes none between marks."""
    plain, prompt = renderings.answer, renderings.prompt
    for end, turn in (
        (TEXT, renderings.turn(TEXT, thought=THOUGHT)),
        (NAMES[0], renderings.turn(None, calls_of([NUMBER]), thought=THOUGHT)),
    ):
        before, has_thought, behind = (turn or "").partition(THOUGHT)
        between, has_end, after = behind.partition(end)
        if has_thought and has_end:
            break
    else:
        return None
    start = min(len(common_start(before, other)) for other in (plain, prompt))
    opening, prompted = before[start:].strip(), prompt[len(common_start(before, prompt)) :].strip()
    if not any(map(is_mark, pieces(prompted))):
        opening = opening or prompted
    opening = _opening(before[:start], opening, between)
    closing = _first_marks(between, opening)
    if not opening or not closing:
        return None
    lead = between.partition(closing)[2]
    if end != TEXT:
        lead, _, after = plain[len(common_start(plain, prompt)) :].partition(TEXT)
        lead = lead.rpartition(closing)[2]
    tags = _answer_tags(lead.strip(), after)
    end = "" if tags is None else after[after.index(tags[1]) + len(tags[1]) :]
    return _known(opening, closing, tags, inner_end(end))


def _opening(before: str, opening: str, between: str) -> str:
    """Return the marks before a thought. The prompt may have them too, or their beginning; before is that text."""
    marks = pieces(before)
    if opening:
        is_rest = bool(marks) and not is_mark(opening) and is_mark(marks[-1]) and before.endswith(marks[-1])
        return marks[-1] + opening if is_rest else opening
    last = (before.strip().splitlines() or [""])[-1]
    if not any(map(is_mark, pieces(last))):
        return last
    # A mark that other texts have too is the end of several.
    while marks and (not is_mark(opening) or opening in between):
        marks, opening = marks[:-1], marks[-1] + opening
    return opening


def _first_marks(text: str, model: str) -> str:
    """Return the beginning of a text with as many marks as the model has; at least one."""
    num_marks, end = max(1, sum(map(is_mark, pieces(model)))), 0
    for piece in pieces(text):
        if not num_marks:
            break
        end = text.index(piece, end) + len(piece)
        num_marks -= is_mark(piece)
    return "" if num_marks else text[:end].strip()


def _answer_tags(opening: str, after: str) -> tuple[str, str] | None:
    """Return the marks around an answer, if there are any."""
    if not any(map(is_mark, pieces(opening))):
        return None
    closing = _first_marks(after, opening)
    return opening, closing if len(closing) < len(after.strip()) else ""


def _known(opening: str, closing: str, tags: tuple[str, str] | None, turn_end: str) -> ReasoningFormat:
    for form in KNOWN_FORMATS:
        if (form.opening, form.closing, form.answer_tags) == (opening, closing, tags):
            return form
    tokens = filter(is_mark, pieces("".join((opening, closing, *(tags or ()), turn_end))))
    return ReasoningFormat(
        opening, opening, closing, tokens=tuple(dict.fromkeys(tokens)), answer_tags=tags, turn_end=turn_end
    )
