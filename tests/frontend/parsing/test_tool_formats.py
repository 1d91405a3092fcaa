"""Tool calls in text, read in pieces of any size."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from penstock.frontend.parsing.answer_parser import AnswerShape
from penstock.frontend.parsing.reasoning import THINK
from tests.frontend.parsing.tool_texts import (
    CALLS,
    CUTS,
    FORMATS,
    FUNCTIONS,
    TAGGED_CALLS,
    calls_in,
    cut,
    read,
    written,
)

CHEAP = settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
IN_JSON = [name for name, form in FORMATS.items() if form.parameters is None]
IN_TAGS = [name for name, form in FORMATS.items() if form.parameters is not None]


@pytest.mark.parametrize("name", IN_JSON)
@CHEAP
@given(CALLS, CUTS, st.booleans(), st.sampled_from([None, 1]))
def test_written_calls_are_read_in_any_split(
    name: str, calls: list[tuple[str, dict[str, Any]]], cuts: list[int], ascii_only: bool, indent: int | None
) -> None:
    form = FORMATS[name]
    texts = [(call, json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)) for call, arguments in calls]
    shape = AnswerShape(THINK, tools=form, functions=FUNCTIONS)
    reasoning, content, read_calls = read(shape, cut(f"<think>\nhm {{\n</think>\n\n{written(form, texts)}", cuts))
    assert (reasoning, content) == ("hm {", "")
    assert [(call, json.loads(arguments)) for call, arguments in read_calls] == calls
    if name != "pythonic":
        assert read_calls == texts  # the model's own spelling


@pytest.mark.parametrize("name", IN_TAGS)
@CHEAP
@given(TAGGED_CALLS, CUTS)
def test_tagged_calls_are_read_in_any_split(
    name: str, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    form = FORMATS[name]
    assert form.parameters is not None
    texts = [(call, json.dumps(arguments, ensure_ascii=False)) for call, arguments in calls]
    keys = {key for _, arguments in calls for key in arguments}
    properties = {key: {"type": "string"} for key in keys if key.startswith("text ")}
    shape = AnswerShape(THINK, tools=form, functions={call: {"properties": properties} for call, _ in calls})
    text = written(form, texts)
    assume(text.count(form.parameters.closing) == sum(len(arguments) for _, arguments in calls))
    reasoning, content, read_calls = read(shape, cut(f"<think>\nhm {{\n</think>\n\n{text}", cuts))
    assert (reasoning, content) == ("hm {", "")
    assert [(call, json.loads(arguments)) for call, arguments in read_calls] == calls


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool", "<think>", "</think>", "[TOOL_CALLS]", "[TOOL", "[ARGS]", "[CALL_ID]",
    "<|python_tag|>", '{"name": "f", "arguments": {', '{"name":"g","parameters":{}}', '"name"', "[f(a=1", "g()", "**{",
    "{", "}", "[", "]", "(", ")", '"', "'", "\\", "\\u12", ":", ",", ";", "=", "1", "-", "e", "tru", "null", " ", "\n",
    "é", "🐈", "<function=f>", "<function=", "<parameter=a>", "</parameter>", "</function>", "f", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "```json", "```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|tool_call|>",
    "<start_function_call>", "<end_function_call>", "<escape>", "<|tool_call>", "<tool_call|>", '<|"|>', "call:f{",
    "a:",
    "<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', '<｜DSML｜parameter name="a" string="true">',
    '<｜DSML｜parameter name="a"', "</｜DSML｜parameter>", "</｜DSML｜invoke>", "</｜DSML｜tool_calls>", "｜DSML｜",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|tool_calls_section_end|>",
    "<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|channel|>analysis<|message|>", " to=f", "<|call|>",
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>", "<|channel|>final<|message|>", "assistant",
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
@CHEAP
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join), CUTS, st.booleans())
def test_any_text_is_read_completely_and_alike_in_any_split(
    name: str, text: str, cuts: list[int], reasons: bool
) -> None:
    shape = AnswerShape(THINK if reasons else None, tools=FORMATS[name], functions=FUNCTIONS)
    reasoning, content, calls = read(shape, cut(text, cuts))
    assert (reasoning, content, calls) == read(shape, [text])
    if not reasons and not calls and name != "harmony":  # whose marks are never text
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
        ("llama3_json", 'Well.\n{"name":"f", "parameters": {}}', "Well.", [("f", "{}")]),
        ("llama3_json", 'A\n```json\n[{"name": "f", "parameters": {}}]\n```\nB', "A\nB", [("f", "{}")]),
        ("llama3_json", '```json\n{"name": "h"}\n```', '```json\n{"name": "h"}\n```', []),
        ("llama3_json", 'Well <|python_tag|>{"name": "f"};{"name": "g"} end', "Well end", [("f", "{}"), ("g", "{}")]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g"}]', "", [("f", "{}"), ("g", "{}")]),
        (
            "mistral, names first",
            'a [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g{}',
            "a",
            [("f", '{"x": 1}'), ("g", "{}")],
        ),
        ("pythonic", "[f()]", "", [("f", "{}")]),
        (
            "pythonic",
            " [ f(a=-1, b='it\\'s \\u00e9', c=[True, None, (1.5,)], d={'k': \"\\n\"},),\n g( ) ] ",
            "",
            [("f", '{"a": -1, "b": "it\'s é", "c": [true, null, [1.5]], "d": {"k": "\\n"}}'), ("g", "{}")],
        ),
        (
            "qwen3_coder",
            (
                "Let me look.\n\n<tool_call>\n<function=f>\n<parameter=text>\nline 1\n  line 2\n\n</parameter>\n"
                "<parameter=number>\n007\n</parameter>\n<parameter=flag>\nTrue\n</parameter>\n<parameter=list>\n"
                '["a", {"b": 1}]\n</parameter>\n</function>\n</tool_call>'
            ),
            "Let me look.",
            [("f", '{"text": "line 1\\n  line 2\\n", "number": "007", "flag": true, "list": ["a", {"b": 1}]}')],
        ),
        (
            "qwen3_coder",
            (
                "<tool_call>\n<function=f>\n<parameter=kind>\n1\n</parameter>\n<parameter=maybe>\n1\n</parameter>\n"
                "</function>\n</tool_call>\n<tool_call>\n<function=f>\n<parameter=maybe>\nnull\n</parameter>\n</function>\n"
                "</tool_call>"
            ),
            "",
            [("f", '{"kind": "1", "maybe": "1"}'), ("f", '{"maybe": null}')],
        ),
        ("qwen3_coder", "<function=f><parameter=number>1e3</parameter></tool_call>!", "!", [("f", '{"number": 1e3}')]),
        (
            "qwen3_coder",
            "<tool_call><function=nobody><parameter=a>[1]</parameter></function>",
            "",
            [("nobody", '{"a": [1]}')],
        ),
        ("qwen3_coder", "<tool_call>\n<function=g>\n</function>\n</tool_call>", "", [("g", "{}")]),
        ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")]),
        (
            "glm4",
            (
                "Ok: <tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Beijing</arg_value>\n"
                "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
            ),
            "Ok:",
            [("get_weather", '{"city": "Beijing", "days": 3}')],
        ),
        (
            "glm4",
            "<tool_call>f<arg_key>text</arg_key><arg_value> 1 </arg_value></tool_call>",
            "",
            [("f", '{"text": " 1 "}')],
        ),
        ("glm4", "<tool_call>g\n</tool_call> <tool_call>g</tool_call>", "", [("g", "{}"), ("g", "{}")]),
        ("glm4", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        (
            "deepseek",
            (
                "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
                '{"city": "```"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n'
                "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
            "I look.",
            [("get_weather", '{"city": "```"}'), ("f", "{}")],
        ),
        (
            "deepseek, V3.1",
            (
                '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
            "",
            [("f", '{"a": 1}'), ("function", "{}")],
        ),
        ("deepseek, V3.1", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜> So.", "So.", [("f", "{}")]),
        (
            "deepseek_v32",
            (
                'I look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
                '<｜DSML｜parameter name="text" string="true">5</｜DSML｜parameter>\n'
                '<｜DSML｜parameter name="number" string="false">5</｜DSML｜parameter>\n'
                '<｜DSML｜parameter name="list" string="false">["a", {}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
                '<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
            ),
            "I look.",
            [("f", '{"text": "5", "number": 5, "list": ["a", {}]}'), ("g", "{}")],
        ),
        (  # a type that the schema forbids, no type, and a name without a schema
            "deepseek_v32",
            (
                '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="text" string="false">5'
                '</｜DSML｜parameter><｜DSML｜parameter name="number" string="true">5</｜DSML｜parameter>'
                '<｜DSML｜parameter name="maybe">null</｜DSML｜parameter>'
                '<｜DSML｜parameter name="x" string="true">[1]</｜DSML｜parameter></｜DSML｜invoke>'
                "</｜DSML｜function_calls>"
            ),
            "",
            [("f", '{"text": "5", "number": 5, "maybe": null, "x": "[1]"}')],
        ),
        ("deepseek_v32", '<｜DSML｜invoke name="f">{"a": 1}</｜DSML｜invoke> So.', "So.", [("f", '{"a": 1}')]),
        (
            "deepseek_v32",
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f>',
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f>',
            [],
        ),
        (
            "kimi_k2",
            (
                "I look. <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
                '<|tool_call_argument_begin|>{"city": "été"}<|tool_call_end|><|tool_call_begin|>f:12 '
                '<|tool_call_argument_begin|> {"a": {}} <|tool_call_end|><|tool_calls_section_end|> '
            ),
            "I look.",
            [("get_weather", '{"city": "été"}'), ("f", '{"a": {}}')],
        ),
        ("kimi_k2", "<|tool_call_begin|>g<|tool_call_argument_begin|><|tool_call_end|> So.", "So.", [("g", "{}")]),
        ("kimi_k2", "a<|tool_calls_section_begin|> b", "a<|tool_calls_section_begin|> b", []),
        (
            "granite",
            '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]',
            "",
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        ("granite", 'Ok. <tool_call> [{"arguments": {}, "name": "f"}]', "Ok.", [("f", "{}")]),
        ("granite", '<|tool_call|>{"name": "f"}', "", [("f", "{}")]),
        (
            "gemma",
            (
                '<start_function_call>call:get_weather{location:<escape>London, "UK"<escape>,days:3}<end_function_call>'
                "<start_function_call>call:f{a:{b:[true,None,<escape><escape>],<escape>c<escape>:-1.5},d:low}<end_function_call>"
            ),
            "",
            [
                ("get_weather", '{"location":"London, \\"UK\\"","days":3}'),
                ("f", '{"a":{"b":[true,null,""],"c":-1.5},"d":"low"}'),
            ],
        ),
        ("gemma, 4", "<|tool_call>:f{}<tool_call|>", "", [("f", "{}")]),
        ("gemma, 4", 'So <|tool_call>call:f{a:<|"|>x}<|"|>}<tool_call|> then', "So then", [("f", '{"a":"x}"}')]),
        # The prompt that Gemma 3's documentation recommends asks for this.
        ("pythonic", '[get_weather(city="Paris", days=2)]', "", [("get_weather", '{"city": "Paris", "days": 2}')]),
    ],
)
def test_calls_are_read_as_models_write_them(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert calls_in(name, text) == (content, calls)


@pytest.mark.parametrize("name", FORMATS)
def test_first_call_ends_the_answer_with_single_call(name: str) -> None:
    form = FORMATS[name]
    text = written(form, [("f", '{"a": 1}'), ("g", "{}")]) + " and more"
    assert calls_in(name, text, single_call=True) == ("", [("f", '{"a": 1}')])
    parser = AnswerShape(tools=form, functions=FUNCTIONS, single_call=True).new_parser()
    parser.push(text)
    assert parser.is_complete


def test_arguments_are_emitted_as_they_arrive() -> None:
    parser = AnswerShape(tools=FORMATS["hermes"], functions=FUNCTIONS).new_parser()
    assert parser.push('<tool_call>{"name": "f", "arg') == []
    opening, *pieces = parser.push('uments": {"text": "once')
    assert (opening.tool_calls[0].name, opening.tool_calls[0].arguments) == ("f", "")
    assert "".join(piece.tool_calls[0].arguments for piece in pieces) == '{"text": "once'
    assert [piece.tool_calls[0].arguments for piece in parser.push(" upon")] == [" upon"]


def test_text_parameter_is_emitted_as_it_arrives() -> None:
    parser = AnswerShape(tools=FORMATS["qwen3_coder"], functions=FUNCTIONS).new_parser()
    pieces = [
        "<function=f>",
        "<parameter=text>\none\n",
        "two </",
        "p",
        "arameter>",
        "<parameter=list>[1",
        "]</parameter>",
    ]
    emitted = ["".join(call.arguments for delta in parser.push(piece) for call in delta.tool_calls) for piece in pieces]
    assert emitted == ["", '{"text": "one', "\\ntwo ", "", '"', "", ', "list": [1]']


def test_text_is_held_only_while_it_may_be_a_marker() -> None:
    parser = AnswerShape(tools=FORMATS["hermes"], functions=FUNCTIONS).new_parser()
    assert [delta.text for delta in parser.push("a <b> <tool")] == ["a <b>"]
    assert [delta.text for delta in parser.push("box> ")] == [" <toolbox>"]


@pytest.mark.parametrize("name", FORMATS)
def test_call_ids_are_random(name: str) -> None:
    ids = {FORMATS[name].new_call_id() for _ in range(1000)}
    assert len(ids) == 1000
    form = r"[a-zA-Z0-9]{9}" if name.startswith("mistral") else r"call_[0-9a-f]{24}"
    assert all(re.fullmatch(form, call_id) for call_id in ids)
