"""Finds the format of a model's calls: what its chat template writes around known names and arguments.

A format is found only if its reader reads the template's text back as the same calls.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock.frontend.parsing.answer_parser import AnswerShape
from penstock.frontend.parsing.blocks import ChoiceOutput
from penstock.frontend.parsing.harmony import CHANNEL, Harmony
from penstock.frontend.parsing.json_text import repaired_json
from penstock.frontend.parsing.syntax.named_formats import FUNCTOOLS, MARKS
from penstock.frontend.parsing.syntax.rendered import (
    FUNCTIONS,
    NAMES,
    NUMBER,
    PROBES,
    TEXT,
    Arguments,
    Call,
    Renderings,
    are_shown,
    calls_of,
    common_end,
    common_start,
    ids_as_numbers,
)
from penstock.frontend.parsing.tool_formats.base import CALL_NUMBER, ParameterLayout, ToolFormat
from penstock.frontend.parsing.tool_formats.gemma import Gemma
from penstock.frontend.parsing.tool_formats.marked import CallMarks, Marked, inner_end, is_mark, pieces
from penstock.frontend.parsing.tool_formats.minimax import MARK as MINIMAX
from penstock.frontend.parsing.tool_formats.minimax import MiniMax
from penstock.frontend.parsing.tool_formats.pythonic import Pythonic

_MAX_TURN_CHARACTERS = 20_000
_NUMBER = re.compile(r"\d+")
_EXTRA_STARTS = ("<|python_tag|>", "<|tool_call|>", "<tool_call>", FUNCTOOLS)
"""Begin calls of models whose templates write calls without a mark, if they are tokens, or named by the template."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn of calls as the template writes it."""

    text: str
    """From the first mark of the calls to the end of the turn."""
    end: int
    """Where the turn's own end begins."""
    calls: list[Call]


def find_calls(
    renderings: Renderings, added_tokens: Iterable[str], closings: tuple[str, ...] = ()
) -> ToolFormat | None:
    """Return the format of the calls that the template writes; None if it writes none or in no format that is read.

    closings are the marks that end reasoning and answers.
    """
    turns = [_first_turn(renderings, calls_of(arguments), closings) for arguments in PROBES]
    for turn in filter(None, turns):
        with contextlib.suppress(ValueError, IndexError):  # marks are not where a known kind of format has them
            for form in _candidates(turn, turns[0], turns[1], frozenset(added_tokens)):
                if _reads_back(form, turn):
                    return form
    return None


def shows_calls(renderings: Renderings) -> bool:
    """Whether the template writes calls at all."""
    calls = calls_of([NUMBER])
    return are_shown(calls, renderings.turn(None, calls) or "")


def _first_turn(renderings: Renderings, calls: list[Call], closings: tuple[str, ...]) -> _Turn | None:
    """Return a turn of two calls, or of one if the template takes no more."""
    turns = (
        _rendered_turn(renderings, calls[:num_calls], closings) for num_calls in range(renderings.most_calls, 0, -1)
    )
    return next(filter(None, turns), None)


def _rendered_turn(renderings: Renderings, calls: list[Call], closings: tuple[str, ...]) -> _Turn | None:
    """Return the calls as the template writes them, without the text before and behind them."""
    text = renderings.turn(None, calls)
    if text is None or len(text) > _MAX_TURN_CHARACTERS or not are_shown(calls, text):
        return None
    name_start = text.index(NAMES[0])
    start = min(name_start, len(common_start(text, renderings.prompt)))
    for closing in closings:
        if closing in text[start:name_start]:
            start = text.rindex(closing, start, name_start) + len(closing)
    before = text[start:]
    with_text = renderings.turn(TEXT, calls)
    if with_text is not None and TEXT in with_text and with_text.find(TEXT) < with_text.find(NAMES[0]):
        behind = with_text.partition(TEXT)[2]
        # The calls begin alike behind a text; what differs belongs to the text or to the turn.
        place, other = before.index(NAMES[0]), behind.index(NAMES[0])
        before = common_end(before[:place], behind[:other]) + before[place:]
    return _Turn(before, _turn_end(before, calls[-1][0], renderings), calls)


def _turn_end(text: str, last_name: str, renderings: Renderings) -> int:
    """Return where the end of the turn begins: with a mark that stands in each prompt, or behind each answer."""
    start = text.index(last_name)
    call_marks = pieces(text[:start])
    turn_marks = [mark for mark in pieces(renderings.prompt) if is_mark(mark) and mark not in call_marks]
    places = [place for mark in turn_marks if (place := text.find(mark, start)) >= 0]
    text = text[: min(places, default=len(text))].rstrip()
    answer_end = renderings.answer.rpartition(TEXT)[2].rstrip()
    tail = common_end(text, answer_end)
    if answer_end and not tail and not places:  # the turn has an end of its own
        tail = pieces(text)[-1]
    return len(text) - len(tail) + len(inner_end(tail))


def _candidates(turn: _Turn, full: _Turn | None, plain: _Turn | None, tokens: frozenset[str]) -> list[ToolFormat]:
    """Return the formats that the turn may have. full and plain are the turns with all arguments and with two texts."""
    text = turn.text
    if f"{CHANNEL}commentary" in text:
        return [Harmony()]
    if f"call:{NAMES[0]}{{" in text:
        return [Gemma(is_fourth="<|tool_call>" in text)]
    if MINIMAX in text:
        return [MiniMax()]
    found = [_pythonic(turn)] if f"{NAMES[0]}(" in text else []
    marks = _object_marks(turn, tokens) or _named_marks(turn) or _tagged_marks(plain, full)
    if marks is not None:
        found.append(Marked(_name_of(marks), marks, tokens))
    return found


def _name_of(marks: CallMarks) -> str:
    """Return the name of the option --tool-parser for these marks, or their first mark."""
    for name, known in MARKS.items():
        is_like = _first_mark(marks) == _first_mark(known) or marks.parameters is not None
        if is_like and _style(marks) == _style(known):
            return name.partition(",")[0]
    return _first_mark(marks)


def _first_mark(marks: CallMarks) -> str:
    found = pieces(marks.section[0] + marks.call[0])
    return next(filter(is_mark, found), next(iter(found), "json"))


def _style(marks: CallMarks) -> object:
    return marks.object is None, marks.is_list, "" if marks.parameters is None else marks.parameters.opening


def _reads_back(form: ToolFormat, turn: _Turn) -> bool:
    """Whether the format reads the template's text as the calls, and nothing else is left of it."""
    shape = AnswerShape(tools=form, functions=FUNCTIONS)
    parser, output = shape.new_parser(), ChoiceOutput()
    for delta in (*parser.push(turn.text[: turn.end]), *parser.flush()):
        output.add(delta)
    calls = [(call.name, json.loads(call.arguments)) for call in output.tool_calls]
    return calls == turn.calls and not output.text.strip()


def _pythonic(turn: _Turn) -> ToolFormat:
    start, last = turn.text.index(f"{NAMES[0]}("), turn.text.rfind(")", 0, turn.end)
    lead, tail = turn.text[:start].strip(), turn.text[last + 1 : turn.end].strip()
    is_list = lead.endswith("[")
    return Pythonic((lead.removesuffix("["), tail.removeprefix("]").strip()), is_list=is_list)


def _object_marks(turn: _Turn, tokens: frozenset[str]) -> CallMarks | None:
    """Return the marks of calls that are JSON objects with a name and arguments."""
    first = _find_object(turn.text, turn.text.index(NAMES[0]), turn.calls[0])
    if first is None:
        return None
    start, end, is_list = first
    lead, between = turn.text[:start], ""
    if not is_list and len(turn.calls) > 1:
        second = _find_object(turn.text, turn.text.index(NAMES[1], end), turn.calls[1], end)
        if second is None:
            return None
        between, end = turn.text[end : second[0]], second[1]
    section, call, separator = _split(
        lead, between, turn.text[end : turn.end], is_alone=len(turn.calls) == 1 or is_list
    )
    if is_list:
        section, call = (section[0] + call[0], call[1] + section[1]), ("", "")
    written = turn.text[first[0] :].lstrip("[ \n")
    name_end = written.index(NAMES[0])
    rest = written[name_end + len(NAMES[0]) :]
    middle = rest[: _value_start(rest)]
    starts: tuple[str, ...] = ()
    if not any(map(is_mark, pieces(section[0] + call[0]))):
        starts = tuple(start for start in _EXTRA_STARTS if start in tokens)
    return CallMarks(
        section,
        call,
        ", " if is_list else separator or ("" if any(call) or section[0] else "; "),
        object=(_one_line(ids_as_numbers(written[:name_end], CALL_NUMBER)), _one_line(middle), "}"),
        is_list=is_list,
        starts=starts,
        short_ids="[TOOL_CALLS]" in lead,
    )


def _one_line(text: str) -> str:
    """Return the beginning of an object on one line, with the number of the call replaced."""
    line = re.sub(r"\s*\n\s*", "", text) if "\n" in text else text
    return re.sub(r'(_id": ")\d+(")', rf"\g<1>{CALL_NUMBER}\g<2>", line)


def _value_start(text: str) -> int:
    return min(place for place in (text.find("{"), text.find(': "{') + 2) if place >= 2 or text[:1] == "{")


def _find_object(text: str, name_start: int, call: Call, least: int = 0) -> tuple[int, int, bool] | None:
    """Return where the object, or list of objects, begins and ends that contains the name."""
    for match in re.finditer(r"[{\[]", text[least:name_start]):
        start = least + match.start()
        found = repaired_json(text, start)
        if found is None or found[1] <= name_start:
            continue
        value = json.loads(found[0])
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, dict) and _is_call(first, call):
            return start, found[1], isinstance(value, list)
    return None


def _is_call(value: dict[str, Any], call: Call) -> bool:
    name, arguments = call
    values = list(value.values())
    return (name in values and any(_same(inner, arguments) for inner in values)) or _same(value.get(name), arguments)


def _same(value: object, arguments: Arguments) -> bool:
    return value == arguments or value == json.dumps(arguments)


def _named_marks(turn: _Turn) -> CallMarks | None:
    """Return the marks of names that JSON or tagged parameters follow."""
    text, (name, arguments) = turn.text, turn.calls[0]
    start = text.index(name)
    if (found := _find_arguments(text, start + len(name), arguments)) is None:
        return None
    arguments_start, end = found
    middle, between = text[start + len(name) : arguments_start], ""
    if len(turn.calls) > 1:
        second_name, second_arguments = turn.calls[1]
        second_start = text.find(second_name, end)
        second = _find_arguments(text, second_start + len(second_name), second_arguments)
        if second_start < 0 or second is None:
            return None
        middle = _same_but_numbers(middle, text[second_start + len(second_name) : second[0]])
        between, end = text[end:second_start], second[1]
    section, call, separator = _split(text[:start], between, text[end : turn.end], is_alone=len(turn.calls) == 1)
    return CallMarks(section, call, separator, middle=middle, short_ids="[TOOL_CALLS]" in text[:start])


def _find_arguments(text: str, position: int, arguments: Arguments) -> tuple[int, int] | None:
    start = text.find("{", position)
    found = None if start < 0 else repaired_json(text, start)
    if found is None or json.loads(found[0]) != arguments:
        return None
    return start, found[1]


def _tagged_marks(plain: _Turn | None, full: _Turn | None) -> CallMarks | None:
    """Return the marks of parameters that are written one by one."""
    if plain is None:
        return None
    text, parts = plain.text, list[str]()
    for name, arguments in plain.calls:
        parts += (name, *(text for key, value in arguments.items() for text in (key, str(value))))
    gaps: list[str] = []
    position = 0
    for part in parts:
        if (place := text.find(part, position)) < 0:
            return None
        gaps.append(text[position:place])
        position = place + len(part)
    gaps.append(text[position : plain.end])
    # The gaps are before the name, a key, its text, a key, its text, and then before the second name or the end.
    lead, before_key, middle, between_keys, _, *rest = gaps
    opening = common_end(before_key, between_keys)
    opening = opening[max(0, opening.rfind("<")) :]
    behind = between_keys[: len(between_keys) - len(opening)]
    closing = behind.rstrip()
    gap, head = behind[len(closing) :], before_key[: len(before_key) - len(opening)]
    between, tail = (rest[0], rest[-1]) if len(rest) > 1 else ("", rest[0])
    if not opening or not closing.strip() or not all(end.startswith(closing) for end in rest[:: max(1, len(rest) - 1)]):
        return None
    if len(rest) > 1:
        head = _same_but_numbers(head, rest[1][: len(rest[1]) - len(opening)])
    section, call, separator = _split(
        lead,
        between[len(closing) :].removeprefix(gap),
        tail[len(closing) :].removeprefix(gap),
        is_alone=len(rest) == 1,
    )
    is_indented = middle.endswith("\n") and closing.startswith("\n")
    layout = ParameterLayout(
        opening,
        middle,
        closing[is_indented:],
        gap,
        is_indented=is_indented,
        json_middle=_json_middle(full, middle, opening),
    )
    return CallMarks(section, call, separator, middle=head, parameters=layout)


def _json_middle(full: _Turn | None, middle: str, opening: str) -> str:
    """Return the marks before a value that is no text, if they differ."""
    pattern = rf"{re.escape(opening)}days(.{{1,80}}?){NUMBER['days']}"
    found = None if full is None else re.search(pattern, full.text, re.DOTALL)
    return "" if found is None or found[1] == middle else found[1]


def _same_but_numbers(first: str, second: str) -> str:
    """Return the text that two calls have in common; `CALL_NUMBER` stands for the numbers and ids in it."""
    first, second = (ids_as_numbers(text, CALL_NUMBER) for text in (first, second))
    return first if first == second else _NUMBER.sub(CALL_NUMBER, first)


def _split(lead: str, between: str, tail: str, *, is_alone: bool) -> tuple[tuple[str, str], tuple[str, str], str]:
    """Split the texts before, between and behind calls into the marks of the section, of a call, and the separator."""
    lead, between, tail = (ids_as_numbers(text, CALL_NUMBER) for text in (lead.lstrip(), between, tail))
    if is_alone:
        return ("", ""), (lead, tail), ""
    end = common_start(between, tail)
    start = common_end(lead, between[len(end) :])
    separator = between[len(end) : len(between) - len(start)]
    section = lead[: len(lead) - len(start)], tail[len(end) :]
    return section if section[0] else ("", ""), (start, end), separator
