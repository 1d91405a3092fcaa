"""Tool calls as models write them, and reading them in pieces of any size."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from penstock.frontend.parsing.answer_parser import AnswerShape
from penstock.frontend.parsing.blocks import ChoiceOutput
from penstock.frontend.parsing.harmony import Harmony
from penstock.frontend.parsing.syntax.named_formats import MARKS
from penstock.frontend.parsing.tool_formats.base import CALL_NUMBER, ToolFormat
from penstock.frontend.parsing.tool_formats.gemma import Gemma
from penstock.frontend.parsing.tool_formats.marked import Marked
from penstock.frontend.parsing.tool_formats.minimax import MiniMax
from penstock.frontend.parsing.tool_formats.pythonic import Pythonic

FUNCTIONS: dict[str, dict[str, Any]] = {
    "f": {
        "properties": {
            "text": {"type": "string"},
            "number": {"type": "integer"},
            "flag": {"type": "boolean"},
            "list": {"type": "array"},
            "maybe": {"anyOf": [{"$ref": "#/$defs/name"}, {"type": "null"}]},
            "kind": {"enum": ["1", "2"]},
        },
        "$defs": {"name": {"type": "string"}},
    },
    "g": {},
    "get_weather": {},
}
FORMATS: dict[str, ToolFormat] = {
    **{name: Marked(name, marks) for name, marks in MARKS.items()},
    "pythonic": Pythonic(),
    "gemma": Gemma(is_fourth=False),
    "gemma, 4": Gemma(is_fourth=True),
    "harmony": Harmony(),
    "minimax": MiniMax(),
}

Read = tuple[str, str, list[tuple[str, str]]]
"""Reasoning, text, and the calls' names and arguments."""


def read(shape: AnswerShape, pieces: list[str], *, was_cut: bool = False) -> Read:
    parser, message = shape.new_parser(), ChoiceOutput()
    for piece in pieces:
        for delta in parser.push(piece):
            message.add(delta)
    for delta in parser.flush(was_cut=was_cut):
        message.add(delta)
    return message.reasoning, message.text, [(call.name, call.arguments) for call in message.tool_calls]


def read_all_ways(text: str, shape: AnswerShape, *, was_cut: bool = False) -> Read:
    whole = read(shape, [text], was_cut=was_cut)
    for size in (1, 2, 3, 7):
        pieces = [text[start : start + size] for start in range(0, len(text), size)]
        assert read(shape, pieces, was_cut=was_cut) == whole
    return whole


def calls_in(name: str, text: str, *, was_cut: bool = False, **shape: Any) -> tuple[str, list[tuple[str, str]]]:
    shape_of_all = AnswerShape(tools=FORMATS[name], functions=FUNCTIONS, **shape)
    _, content, calls = read_all_ways(text, shape_of_all, was_cut=was_cut)
    return content, calls


def written(form: ToolFormat, calls: list[tuple[str, str]]) -> str:
    """Write calls as the format's models do, given the arguments as JSON."""
    around = [
        ([text.replace(CALL_NUMBER, str(number)) for text in form.around(name)], arguments)
        for number, (name, arguments) in enumerate(calls)
    ]
    return (
        form.opening
        + form.separator.join(before + written_arguments(form, inner) + after for (before, after), inner in around)
        + form.closing
    )


def written_arguments(form: ToolFormat, arguments: str) -> str:
    layout = form.parameters
    if layout is None:
        return arguments
    end = ("\n" if layout.is_indented else "") + layout.closing + layout.gap
    parameters = []
    for key, value in json.loads(arguments).items():
        is_text = isinstance(value, str)
        text = value if is_text else json.dumps(value, ensure_ascii=False)
        middle = layout.middle if is_text else layout.json_middle or layout.middle
        parameters.append(f"{layout.opening}{key}{middle}{text}{end}")
    return "".join(parameters)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text() | st.sampled_from(["}", "]", '"', "\\", "</tool_call>", "<tool_call>", "[TOOL_CALLS]", "🐈", "'"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
NAMES = st.sampled_from(sorted(FUNCTIONS))
CALLS = st.lists(st.tuples(NAMES, st.dictionaries(st.text(), JSON, max_size=3)), min_size=1, max_size=3)
TEXTS = st.text() | st.sampled_from(
    ["\n", "\n\n", "5", "null", "<parameter=x>", "</tool_call>", "<arg_key>", '"', "{}"]
)
PARAMETERS = st.dictionaries(
    st.from_regex(r"text [^<>\n]{0,4}", fullmatch=True), TEXTS, max_size=3
) | st.dictionaries(
    st.from_regex(r"[a-c.:é]{1,4}", fullmatch=True), JSON.filter(lambda value: not isinstance(value, str)), max_size=3
)  # fmt: skip
TAGGED_CALLS = st.lists(st.tuples(NAMES, PARAMETERS), min_size=1, max_size=3)
CUTS = st.lists(st.integers(0, 600), max_size=12)


def cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    return [text[start:end] for start, end in pairwise(places)]
