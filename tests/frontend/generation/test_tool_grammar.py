"""Tools, from the request to the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock.frontend.settings import ParserNames
from penstock.shm.client import TokenBatch
from penstock.shm.messages import MAX_GRAMMAR_CHARACTERS, Constraints, Finish, Grammar
from tests.frontend.harness import ClientConnection, FakeBackend
from tests.frontend.model_families import (
    ALWAYS_THINKING,
    HERMES,
    MODELS,
    THINKING_HERMES,
    Model,
)
from tests.frontend.parsing.test_reasoning import CHAT, HI, talking
from tests.frontend.parsing.tool_texts import written

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
TOOLS: dict[str, Any] = {**HI, "tools": [WEATHER, TIME]}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
CALLS = [("get_weather", '{"city": "été 🐈"}'), ("get_time", "{}")]


async def posted(model: Model, body: dict[str, Any], text: str = "x", **options: Any) -> tuple[FakeBackend, Any]:
    backend = FakeBackend(script=model.says(text, **options))
    async with talking(model, backend) as connection:
        response = await connection.post(CHAT, body)
    assert response.status == 200, response.body
    return backend, response.events() if body.get("stream") else response.json()["choices"][0]


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]


@pytest.mark.parametrize("name", MODELS)
async def test_calls_are_reported_in_every_format(name: str) -> None:
    model = MODELS[name]
    form = model.served().syntax.tools
    assert form is not None
    assert form.name == name.partition(",")[0]
    text = written(form, CALLS)
    _, choice = await posted(model, TOOLS, text)
    message = choice["message"]
    assert calls_of(message) == CALLS
    assert (message["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert all(call["type"] == "function" for call in message["tool_calls"])
    assert len({call["id"] for call in message["tool_calls"]}) == 2


@pytest.mark.parametrize("batch_size", [1, 4, 1000])
@pytest.mark.parametrize("name", MODELS)
async def test_stream_reports_calls_as_openai_does(name: str, batch_size: int) -> None:
    model = MODELS[name]
    form = model.served().syntax.tools
    assert form is not None
    _, events = await posted(model, {**TOOLS, "stream": True}, written(form, CALLS), batch_size=batch_size)
    assert events.pop() == "[DONE]"
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    pieces = [
        event["choices"][0]["delta"]["tool_calls"]
        for event in events
        if "tool_calls" in str(event["choices"][0]["delta"])
    ]
    assert all(len(piece) == 1 for piece in pieces)
    for index, (function, arguments) in enumerate(CALLS):
        first, *others = [piece for (piece,) in pieces if piece["index"] == index]
        assert set(first) == {"index", "id", "type", "function"}
        assert (first["type"], first["function"]) == ("function", {"name": function, "arguments": ""})
        assert all(set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"} for piece in others)
        assert "".join(piece["function"]["arguments"] for piece in others) == arguments
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == ""


async def test_arguments_stream_while_the_model_writes_them() -> None:
    model = Model()
    backend = FakeBackend(script=lambda _: [])
    async with talking(model, backend) as connection:
        body = json.dumps({**TOOLS, "stream": True}).encode()
        connection.send(
            b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body
        )
        await backend.submitted.wait()
        stream = backend.streams[0]
        stream.push(*model.tokenizer.encode('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa').ids)
        await connection.output(b'{\\"city\\": \\"Pa"')
        stream.push(*model.tokenizer.encode('ris"}}\n</tool_call>').ids, finish=Finish.LENGTH)
        events = (await connection.response()).events()
    assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_call_that_is_cut_off_has_finish_reason_length() -> None:
    _, choice = await posted(Model(), TOOLS, '<tool_call>{"name": "get_time", "arguments": {"a', finish=Finish.LENGTH)
    assert calls_of(choice["message"]) == [("get_time", '{"a')]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("name", MODELS)
async def test_forced_call_that_is_cut_off_leaves_no_text(name: str) -> None:
    model = MODELS[name]
    form = model.served().syntax.tools
    assert form is not None
    text = written(form, CALLS)
    num_tokens = len(model.tokenizer.encode(text).ids)
    for max_tokens in {1, 4, num_tokens // 2, num_tokens - 1}:
        body = {**TOOLS, "tool_choice": "required", "max_tokens": max_tokens}
        _, choice = await posted(model, body, text)
        assert choice["finish_reason"] == "length"
        assert not choice["message"]["content"]
        for call, (function, arguments) in zip(calls_of(choice["message"]), CALLS, strict=False):
            assert call[0] == function
            assert arguments.startswith(call[1])


async def test_text_is_kept_beside_calls() -> None:
    text = 'Let me see.\n<tool_call>\n{"name": "get_time"}\n</tool_call>\nDone.'
    _, choice = await posted(Model(), TOOLS, text)
    assert (choice["message"]["content"], calls_of(choice["message"])) == ("Let me see.\nDone.", [("get_time", "{}")])


async def test_malformed_call_is_text() -> None:
    _, choice = await posted(Model(), TOOLS, "<tool_call>{oops}</tool_call>")
    assert choice["message"] == {"role": "assistant", "content": "<tool_call>{oops}</tool_call>", "refusal": None}
    assert choice["finish_reason"] == "stop"


async def test_calls_are_text_without_tools() -> None:
    text = '<tool_call>{"name": "get_time"}</tool_call>'
    for body in (HI, {**TOOLS, "tool_choice": "none"}):
        _, choice = await posted(Model(), body, text)
        assert choice["message"]["content"] == text


async def test_first_call_ends_the_answer_if_the_request_limits_calls() -> None:
    calls = written(MODELS["hermes"].served().syntax.tools, CALLS)  # type: ignore[arg-type]
    for fields in ({"parallel_tool_calls": False}, {"tool_choice": NAMED}):
        backend, choice = await posted(Model(), {**TOOLS, **fields}, calls)
        assert calls_of(choice["message"]) == CALLS[:1]
        assert choice["finish_reason"] == "tool_calls"
        assert backend.streams[0].cancelled.is_set()


async def test_stop_strings_in_calls_are_ignored() -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "END"}}</tool_call>'
    _, choice = await posted(Model(), {**TOOLS, "stop": ["END", "tool_call"]}, text)
    assert calls_of(choice["message"]) == [("get_weather", '{"city": "END"}')]


async def test_calls_have_token_ids_if_requested() -> None:
    backend, choice = await posted(Model(), {**TOOLS, "return_token_ids": True}, '<tool_call>{"name": "get_time"}')
    assert calls_of(choice["message"]) == [("get_time", "{}")]
    assert choice["token_ids"][:-1] == Model().tokenizer.encode('<tool_call>{"name": "get_time"}').ids
    assert backend.last.constraints is None


async def test_special_tokens_other_than_markers_are_skipped() -> None:
    model = MODELS["hermes, special marks"]
    _, choice = await posted(model, TOOLS, 'a<|im_start|>b<tool_call>{"name": "get_time"}</tool_call><|im_end|>')
    assert (choice["message"]["content"], calls_of(choice["message"])) == ("ab", [("get_time", "{}")])


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


async def test_allowed_tools_limit_the_callable_functions() -> None:
    backend, _ = await posted(Model(), {**TOOLS, "tool_choice": allowed("auto", "get_time")})
    assert "get_time" in Model().prompt(backend)
    assert "get_weather" not in Model().prompt(backend)
    assert backend.last.constraints is None
    constraints = await constraints_of(Model(), tool_choice=allowed("required", "get_time"))
    assert constraints is not None
    assert constraints.grammar is not None
    assert "get_time" in constraints.grammar.text
    assert "get_weather" not in constraints.grammar.text


async def test_template_receives_the_tools() -> None:
    backend, _ = await posted(Model(), TOOLS)
    prompt = Model().prompt(backend)
    assert json.dumps(WEATHER) in prompt
    bare = {"name": "get_time", "description": "", "parameters": {"type": "object", "properties": {}}}
    assert json.dumps({"type": "function", "function": bare}) in prompt
    backend, _ = await posted(Model(), {**TOOLS, "tool_choice": "none"})
    assert "get_weather" not in Model().prompt(backend)


async def test_template_receives_calls_and_their_results() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": '{"zone": "é"}'}}
    bare = {"id": "call_2", "type": "function", "function": {"name": "get_time", "arguments": ""}}
    messages = [
        *HI["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call, bare]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    backend, _ = await posted(Model(), {"messages": messages})
    prompt = Model().prompt(backend)
    assert '<tool_call>\n{"name": "get_time", "arguments": {"zone": "é"}}\n</tool_call>' in prompt
    assert '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>' in prompt
    assert "<tool_response>\nnoon\n</tool_response>" in prompt


async def test_tool_result_has_the_name_of_its_function() -> None:
    template = "{% for message in messages %}{{ message.role }}:{{ message.name }} {% endfor %}"
    call = {"id": "a", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    results = [
        {"role": "tool", "tool_call_id": "a", "content": "x"},
        {"role": "tool", "tool_call_id": "b", "content": "x"},
    ]
    messages = [*HI["messages"], {"role": "assistant", "tool_calls": [call]}, *results, {**results[0], "name": "own"}]
    backend, _ = await posted(Model(template, parsers=ParserNames(tools="hermes")), {"messages": messages})
    assert Model().prompt(backend) == "user: assistant: tool:get_time tool: tool:own "


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def with_parameters(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def deep(depth: int) -> Any:
    return {} if depth == 0 else {"not": deep(depth - 1)}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name", '"get_weather" is defined twice'),
        ({"tools": [{**WEATHER, "type": "web"}]}, "tools[0].type", "web"),
        ({"tools": [named("no such name!")]}, "tools[0].function.name", "no such name!"),
        ({"tools": [TIME] * 129}, "tools", "128"),
        ({"tools": [with_parameters({"type": "array"})]}, "tools[0].function.parameters.type", "object"),
        ({"tools": [with_parameters(deep(100))]}, "tools[0].function.parameters", "64 deep"),
        ({"tools": [with_parameters(deep(900))]}, "tools[0].function.parameters", "64 deep"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": None, "tool_choice": NAMED}, "tool_choice", "needs tools"),
        ({"tool_choice": named("unknown")}, "tool_choice.function.name", '"unknown" is not one of the tools'),
        ({"tool_choice": "sometimes"}, "tool_choice", "sometimes"),
        ({"tool_choice": {"type": "custom", "name": "f"}}, "tool_choice.type", "custom"),
        (
            {"tool_choice": allowed("auto", "get_time", "x")},
            "tool_choice.allowed_tools.tools[1].function.name",
            '"x" is not one of the tools',
        ),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools", "1"),
        (
            {"tool_choice": allowed("auto", "get_time"), "tools": []},
            "tool_choice.allowed_tools.tools[0].function.name",
            '"get_time" is not one of the tools',
        ),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "response_format"),
        ({"tool_choice": NAMED, "guided_regex": "a"}, "tool_choice", "response_format"),
        (
            {"tool_choice": "required", "tools": [with_parameters({"const": "x" * MAX_GRAMMAR_CHARACTERS})]},
            "tools",
            str(MAX_GRAMMAR_CHARACTERS),
        ),
    ],
)
async def test_invalid_tool_field_is_refused_by_name(fields: dict[str, Any], param: str | None, says: str) -> None:
    async with talking(Model(), FakeBackend()) as connection:
        response = await connection.post(CHAT, {**TOOLS, **fields})
    assert response.status == 400
    assert response.error["param"] == param
    assert says in response.error["message"]


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_operator_can_disable_tools(choice: str) -> None:
    async with talking(Model(HERMES, parsers=ParserNames(tools="none")), FakeBackend()) as connection:
        response = await connection.post(CHAT, {**TOOLS, "tool_choice": choice})
    assert response.status == 400
    assert (response.error["param"], response.error["code"]) == ("tools", "unsupported_parameter")


async def constraints_of(model: Model, **fields: Any) -> Constraints | None:
    backend, _ = await posted(model, {**TOOLS, **fields})
    return backend.last.constraints


async def test_only_enforced_calls_have_a_grammar() -> None:
    assert await constraints_of(Model()) is None
    assert await constraints_of(Model(), tool_choice="none") is None
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    assert (
        await constraints_of(MODELS["hermes, text marks"], tools=[strict]) is None
    )  # its calls do not begin with a token
    for fields in ({"tool_choice": "required"}, {"tool_choice": NAMED}, {"tools": [strict, TIME]}):
        constraints = await constraints_of(Model(), **fields)
        assert constraints is not None
        assert constraints.grammar is not None
        assert constraints.grammar.kind == "lark"
        assert (" call){0," in constraints.grammar.text) == (fields.get("tool_choice") is not NAMED)


async def test_grammar_covers_only_the_answer_if_calls_look_like_answers() -> None:
    for name in ("llama3_json", "pythonic"):
        constraints = await constraints_of(MODELS[name], response_format={"type": "json_object"})
        assert constraints is not None
        assert constraints.grammar == Grammar("json_schema", '{"type":"object"}')


async def test_grammar_omits_annotations_of_the_schema() -> None:
    parameters = {
        "type": "object",
        "title": "T",
        "description": "long",
        "properties": {"description": {"type": "string", "description": "long"}, "title": {"enum": [{"title": 1}]}},
        "patternProperties": {"default": {"type": "string", "default": "x"}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    constraints = await constraints_of(Model(), tools=tools, tool_choice="required")
    assert constraints is not None
    assert constraints.grammar is not None
    (line,) = [line for line in constraints.grammar.text.splitlines() if line.startswith("tool_0_arguments")]
    schema = json.loads(line.removeprefix("tool_0_arguments: %json "))
    del schema["x-guidance"]
    assert schema == {
        "type": "object",
        "properties": {"description": {"type": "string"}, "title": {"enum": [{"title": 1}]}},
        "patternProperties": {"default": {"type": "string"}},
    }


async def test_grammar_of_a_forced_call_starts_after_the_reasoning() -> None:
    model = Model(ALWAYS_THINKING)
    constraints = await constraints_of(model, tool_choice="required")
    assert constraints is not None
    assert constraints.grammar_after == (model.tokenizer.token_to_id("</think>"),)
    text = '\nHm.\n</think>\n\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    _, choice = await posted(model, {**TOOLS, "tool_choice": "required"}, text)
    assert choice["message"]["reasoning_content"] == "Hm."
    assert calls_of(choice["message"]) == [("get_time", "{}")]


async def test_stream_without_tokens_is_complete(connect: Callable[..., ClientConnection]) -> None:
    backend = FakeBackend(script=lambda _: [TokenBatch([], Finish.LENGTH)])
    async with talking(Model(), backend) as connection:
        choice = (await connection.post(CHAT, TOOLS)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


async def test_batch_delivery_is_off_if_a_call_may_end_the_answer() -> None:
    for body, batch_delivery in ((TOOLS, False), ({**TOOLS, "tool_choice": "none"}, True), (HI, True)):
        backend, _ = await posted(Model(THINKING_HERMES), body, "<think>a</think>b")
        assert backend.last.batch_delivery is batch_delivery
