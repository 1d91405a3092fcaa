"""Calls that are no calls, that break off, and faults that are repaired."""

from __future__ import annotations

import json

import pytest

from penstock.frontend.parsing.answer_parser import AnswerShape
from penstock.shm.messages import Finish
from tests.frontend.harness import FakeBackend
from tests.frontend.model_families import Model
from tests.frontend.parsing.test_reasoning import answered, talking
from tests.frontend.parsing.tool_texts import FORMATS, FUNCTIONS, calls_in


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
        ("qwen3_coder", "<tool_call>"),
        ("qwen3_coder", "<tool_call>\nf\n</tool_call>"),
        ("qwen3_coder", "<function=no such name!></function>"),
        ("qwen3_coder", "<function=f"),
        ("glm4", "The tag <tool_call> opens a call."),
        ("glm4", "<tool_call>f(1)</tool_call>"),
        ("glm4", "<tool_call>f <arg_value>"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>f\n```json\n[]"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"),
        ("granite", "<|tool_call|>[]"),
        ("gemma", "<start_function_call>f{}<end_function_call>"),
        ("gemma", "<start_function_call>call:f(a=1)"),
        ("granite", "<|tool_call|> what"),
    ],
)
def test_malformed_call_is_text(name: str, text: str) -> None:
    assert calls_in(name, text) == (text, [])


BROKEN = [
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":tru}}</tool_call>'),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a" 5}}</tool_call>'),
    ("hermes", 'I look: <tool_call>{"name":"f","arguments":{"a":!</tool_call>'),
    ("qwen3_coder", "<function=g><parameter=a>1</parameter> oops"),
    ("glm4", "<tool_call>g<arg_key>a</arg_key>oops"),
    ("gemma", "<start_function_call>call:f{a:}<end_function_call>"),
    ("gemma", "<start_function_call>call:f{a:" + "[" * 100),
    ("deepseek, V3.1", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{oops}"),
]


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_broken_call_is_text_unchanged_and_no_call(name: str, text: str) -> None:
    assert calls_in(name, text) == (text, [])


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("kimi_k2", '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"a": 1', [("f", '{"a": 1')]),
        ("gemma, 4", '<|tool_call>call:f{a:<|"|>x<|"', [("f", '{"a":"x')]),
        ("qwen3_coder", "<tool_call><function=f><parameter=text>a</parameter", [("f", '{"text": "a')]),
        ("deepseek_v32", '<｜DSML｜invoke name="f">\n<｜DSML｜param', [("f", "")]),
    ],
)
def test_unfinished_call_is_a_call_only_if_the_answer_was_cut(
    name: str, text: str, calls: list[tuple[str, str]]
) -> None:
    assert calls_in(name, text, was_cut=True) == ("", calls)
    assert calls_in(name, text) == (text, [])


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        (
            "hermes",
            '<tool_call>{"name":"f","arguments":{"a":!<tool_call>{"name":"g"}</tool_call>',
            '<tool_call>{"name":"f","arguments":{"a":!',
            [("g", "{}")],
        ),
        ("mistral", '[TOOL_CALLS][{"name":"f"}, oops]', ", oops]", [("f", "{}")]),
        ("pythonic", "[f(), oops]", ", oops]", [("f", "{}")]),
    ],
)
def test_calls_beside_a_broken_one_are_calls(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert calls_in(name, text) == (content, calls)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name":"f","arguments":{"a":"x\n\ty"}}', '{"a":"x\\n\\ty"}'),
        (r'{"name":"f","arguments":{"a":"D:\Projects"}}', r'{"a":"D:\\Projects"}'),
        ('{"name":"f","arguments":{"a":1,},}', '{"a":1}'),
        ('{"name":"f","arguments":{"a":1}}}}', '{"a":1}'),
        ('{"name":"f","arguments":{"a":1}', '{"a":1}'),
        ("{'name': 'f', 'arguments': {'a': True}}", '{"a": true}'),
    ],
)
def test_faults_in_a_call_are_repaired(text: str, arguments: str) -> None:
    assert calls_in("hermes", f"<tool_call>\n{text}\n</tool_call>") == ("", [("f", arguments)])


def test_streamed_call_that_breaks_is_marked() -> None:
    parser = AnswerShape(tools=FORMATS["hermes"], functions=FUNCTIONS).new_parser()
    text = '<tool_call>{"name":"f","arguments":{"a": 1, !}}</tool_call>'
    deltas = [*parser.push(text), *parser.flush()]
    assert [delta.is_call_broken for delta in deltas].count(True) == 1
    assert "".join(delta.text for delta in deltas) == text


TOOLS = [{"type": "function", "function": {"name": "f"}}]
HALF = 'I look. <tool_call>\n{"name": "f", "arguments": {"line": "git commit'


@pytest.mark.parametrize("rest", ["", '", oops}}\n</tool_call>'])
async def test_broken_call_does_not_end_an_answer_with_tool_calls(rest: str) -> None:
    message = await answered(Model(), HALF + rest, tools=TOOLS)
    assert (message["content"], message["finish_reason"]) == (HALF + rest, "stop")
    assert "tool_calls" not in message


async def test_call_cut_by_max_tokens_is_reported_as_far_as_it_came() -> None:
    message = await answered(Model(), HALF, Finish.LENGTH, tools=TOOLS)
    assert (message["content"], message["finish_reason"]) == ("I look.", "length")
    assert message["tool_calls"][0]["function"]["arguments"] == '{"line": "git commit'


async def test_broken_call_in_a_stream_of_responses_is_incomplete() -> None:
    model = Model()
    body = {"input": "hi", "stream": True, "tools": [{"type": "function", "name": "f", "parameters": {}}]}
    async with talking(model, FakeBackend(script=model.says(HALF))) as connection:
        response = await connection.post("/v1/responses", body)
    *_, ended, _ = (block for block in response.body.decode().split("\n\n") if block)
    output = json.loads(ended.partition("\ndata: ")[2])["response"]["output"]
    assert [(item["type"], item["status"]) for item in output] == [
        ("message", "completed"),
        ("function_call", "incomplete"),
        ("message", "completed"),
    ]
