"""Tool calls in text, read in pieces of any size."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.frontend.parsing.answer_parser import AnswerShape
from penstock.frontend.parsing.choice_output import ChoiceOutput
from penstock.frontend.parsing.reasoning import THINK
from penstock.frontend.parsing.tool_formats.base import ToolFormat
from penstock.frontend.parsing.tool_formats.hermes import Hermes
from penstock.frontend.parsing.tool_formats.llama3_json import Llama3Json
from penstock.frontend.parsing.tool_formats.mistral import Mistral
from penstock.frontend.parsing.tool_formats.pythonic import Pythonic

NAMES = frozenset({"f", "g", "get_weather"})
FORMATS: dict[str, ToolFormat] = {
    "hermes": Hermes(),
    "llama3_json": Llama3Json(),
    "mistral": Mistral(names_first=False),
    "mistral, names first": Mistral(names_first=True),
    "pythonic": Pythonic(),
}

Read = tuple[str, str, list[tuple[str, str]]]
"""Reasoning, text, and the calls' names and arguments."""


def read(shape: AnswerShape, pieces: list[str]) -> Read:
    parser, message = shape.new_parser(), ChoiceOutput()
    for piece in pieces:
        for delta in parser.push(piece):
            message.add(delta)
    for delta in parser.flush():
        message.add(delta)
    return message.reasoning, message.text, [(call.name, call.arguments) for call in message.tool_calls]


def read_all_ways(text: str, shape: AnswerShape) -> Read:
    whole = read(shape, [text])
    for size in (1, 2, 3, 7):
        assert read(shape, [text[start : start + size] for start in range(0, len(text), size)]) == whole
    return whole


def calls_in(name: str, text: str, **shape: Any) -> tuple[str, list[tuple[str, str]]]:
    _, content, calls = read_all_ways(text, AnswerShape(tools=FORMATS[name], function_names=NAMES, **shape))
    return content, calls


def written(form: ToolFormat, calls: list[tuple[str, str]]) -> str:
    around = [(form.around(name), arguments) for name, arguments in calls]
    return (
        form.opening
        + form.separator.join(before + arguments + after for (before, after), arguments in around)
        + form.closing
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text() | st.sampled_from(["}", "]", '"', "\\", "</tool_call>", "<tool_call>", "[TOOL_CALLS]", "🐈", "'"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
CALLS = st.lists(
    st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(), JSON, max_size=3)), min_size=1, max_size=3
)
CUTS = st.lists(st.integers(0, 600), max_size=12)


def cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=50)
@given(CALLS, CUTS, st.booleans(), st.sampled_from([None, 1]))
def test_written_calls_are_read_in_any_split(
    name: str, calls: list[tuple[str, dict[str, Any]]], cuts: list[int], ascii_only: bool, indent: int | None
) -> None:
    form = FORMATS[name]
    texts = [(call, json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)) for call, arguments in calls]
    shape = AnswerShape(THINK, tools=form, function_names=NAMES)
    reasoning, content, read_calls = read(shape, cut(f"<think>\nhm {{\n</think>\n\n{written(form, texts)}", cuts))
    assert (reasoning, content) == ("hm {", "")
    assert [(call, json.loads(arguments)) for call, arguments in read_calls] == calls
    if name != "pythonic":
        assert read_calls == texts  # the model's own spelling


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool", "<think>", "</think>", "[TOOL_CALLS]", "[TOOL", "[ARGS]", "[CALL_ID]",
    "<|python_tag|>", '{"name": "f", "arguments": {', '{"name":"g","parameters":{}}', '"name"', "[f(a=1", "g()", "**{",
    "{", "}", "[", "]", "(", ")", '"', "'", "\\", "\\u12", ":", ",", ";", "=", "1", "-", "e", "tru", "null", " ", "\n",
    "é", "🐈",
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=50)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join), CUTS, st.booleans())
def test_any_text_is_read_completely_and_alike_in_any_split(
    name: str, text: str, cuts: list[int], reasons: bool
) -> None:
    shape = AnswerShape(THINK if reasons else None, tools=FORMATS[name], function_names=NAMES)
    reasoning, content, calls = read(shape, cut(text, cuts))
    assert (reasoning, content, calls) == read(shape, [text])
    if not reasons and not calls:
        assert content == text


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", 'So: <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "So:", [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call>', "", [("f", '{"a":1}')]),
        ("hermes", '<tool_call>{"id": 1, "name": "f", "x": [{}]}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call> ', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', "", [("nobody", "{}")]),
        ("hermes", '<tool_call>{"name": "f"}', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ("hermes", 'a <tool_call>{"name":"f"}</tool_call>\nb', "a b", [("f", "{}")]),
        ("hermes", 'a<tool_call>{"name":"f"}</tool_call> b', "a b", [("f", "{}")]),
        (
            "hermes",
            '<tool_call>\n{"name": "f"}\n</tool_call>\n<tool_call>\n{"name": "g"}\n</tool_call>\n',
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        ("llama3_json", ' {"name": "f", "parameters": {"a": "}"}}', "", [("f", '{"a": "}"}')]),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        ("llama3_json", 'Well <|python_tag|>{"name": "f"};{"name": "g"} end', "Well end", [("f", "{}"), ("g", "{}")]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g"}]', "", [("f", "{}"), ("g", "{}")]),
        ("mistral", 'a [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g{}', "a", [("f", '{"x": 1}'), ("g", "{}")]),
        ("mistral", "[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{}", "", [("f", "{}")]),
        ("pythonic", "[f()]", "", [("f", "{}")]),
        (
            "pythonic",
            " [ f(a=-1, b='it\\'s \\u00e9', c=[True, None, (1.5,)], d={'k': \"\\n\"},),\n g( ) ] ",
            "",
            [("f", '{"a": -1, "b": "it\'s é", "c": [true, null, [1.5]], "d": {"k": "\\n"}}'), ("g", "{}")],
        ),
    ],
)
def test_calls_are_read_as_models_write_them(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert calls_in(name, text) == (content, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call>\nf(1)\n</tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "text"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "no such name!", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": 5}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": 01}, "name": "f"}</tool_call>'),
        ("llama3_json", '{"name": "Bob", "age": 5}'),
        ("llama3_json", '{"name": "nobody", "parameters": {}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("llama3_json", 'see {"name": "f", "parameters": {}}'),
        ("mistral", "[TOOL_CALLS][]"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS]what now"),
        ("mistral", "[TOOL_CALLS]f[ARGS]"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[nobody(a=1)]"),
        ("pythonic", "[f(a=__import__('os'))]"),
        ("pythonic", "[f(a=1e999)]"),
        ("pythonic", "[f(a='\\ud800')]"),
        ("pythonic", "[f(a='\\U99999999')]"),
        ("pythonic", "[f(**[])]"),
        ("pythonic", "[f(a=" + "[" * 100 + "]" * 100 + ")]"),
        ("pythonic", "see [f()]"),
    ],
)
def test_malformed_call_is_text(name: str, text: str) -> None:
    assert calls_in(name, text) == (text, [])


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>{"name":"f","arguments":{"a":tru}}</tool_call>', "}}</tool_call>", [("f", '{"a":tru')]),
        ("hermes", '<tool_call>{"name":"f","arguments":{}, oops', ", oops", [("f", "{}")]),
        ("mistral", '[TOOL_CALLS][{"name":"f"}, oops]', ", oops]", [("f", "{}")]),
        ("pythonic", "[f(), oops]", ", oops]", [("f", "{}")]),
    ],
)
def test_broken_call_continues_as_text(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert calls_in(name, text) == (content, calls)


def test_broken_call_and_the_next_are_separate_calls() -> None:
    text = '<tool_call>{"name":"f","arguments":{"a":!<tool_call>{"name":"g"}</tool_call>'
    assert calls_in("hermes", text) == ("!", [("f", '{"a":'), ("g", "{}")])


@pytest.mark.parametrize("name", FORMATS)
def test_first_call_ends_the_answer_with_single_call(name: str) -> None:
    form = FORMATS[name]
    text = written(form, [("f", '{"a": 1}'), ("g", "{}")]) + " and more"
    assert calls_in(name, text, single_call=True) == ("", [("f", '{"a": 1}')])
    parser = AnswerShape(tools=form, function_names=NAMES, single_call=True).new_parser()
    parser.push(text)
    assert parser.is_complete


def test_arguments_are_emitted_as_they_arrive() -> None:
    parser = AnswerShape(tools=Hermes(), function_names=NAMES).new_parser()
    assert parser.push('<tool_call>{"name": "f", "arg') == []
    opening, *pieces = parser.push('uments": {"text": "once')
    assert (opening.tool_calls[0].name, opening.tool_calls[0].arguments) == ("f", "")
    assert "".join(piece.tool_calls[0].arguments for piece in pieces) == '{"text": "once'
    assert [piece.tool_calls[0].arguments for piece in parser.push(" upon")] == [" upon"]


def test_text_is_held_only_while_it_may_be_a_marker() -> None:
    parser = AnswerShape(tools=Hermes(), function_names=NAMES).new_parser()
    assert [delta.text for delta in parser.push("a <b> <tool")] == ["a <b>"]
    assert [delta.text for delta in parser.push("box> ")] == [" <toolbox>"]


@pytest.mark.parametrize("name", FORMATS)
def test_call_ids_are_random(name: str) -> None:
    ids = {FORMATS[name].new_call_id() for _ in range(1000)}
    assert len(ids) == 1000
    form = r"[a-zA-Z0-9]{9}" if name.startswith("mistral") else r"call_[0-9a-f]{24}"
    assert all(re.fullmatch(form, call_id) for call_id in ids)
