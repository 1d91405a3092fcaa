"""/v1/responses as a client sees it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shm.client import LogprobEntry, TokenBatch
from penstock.shm.messages import FailureCode, Finish
from tests.frontend.harness import (
    END_TOKEN,
    TOKENIZER,
    ClientConnection,
    FakeBackend,
    Response,
    says,
    token_ids,
)
from tests.frontend.model_families import THINKING_HERMES, Model
from tests.frontend.named_events import REASONED_CALLS, named_events, names

PATH = "/v1/responses"
HI: dict[str, Any] = {"input": "hi"}
WEATHER = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
TIME = {"type": "function", "name": "get_time"}
MODEL = Model(template=THINKING_HERMES)


@contextlib.asynccontextmanager
async def talking(backend: FakeBackend, model: Model = MODEL) -> AsyncIterator[ClientConnection]:
    connection = ClientConnection(model.app(backend))
    try:
        yield connection
    finally:
        await connection.end()


def prompt(backend: FakeBackend, model: Model | None = None) -> str:
    tokenizer = TOKENIZER if model is None else model.tokenizer
    text: str = tokenizer.decode(list(backend.last.token_ids), skip_special_tokens=False)
    return text


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """Return the response without the fields that differ between equal requests."""
    rest: dict[str, Any] = json.loads(json.dumps(response))
    for item in rest["output"]:
        item.pop("id")
        item.pop("call_id", None)
    for field in ("id", "created_at", "completed_at"):
        rest.pop(field)
    return rest


async def test_response_is_answered_whole(connection: ClientConnection, backend: FakeBackend) -> None:
    response = await connection.post(PATH, {**HI, "model": "test/model", "metadata": {"a": "b"}, "temperature": 0.5})
    answer = response.json()
    assert (response.status, answer["object"], answer["status"]) == (200, "response", "completed")
    assert (answer["metadata"], answer["temperature"]) == ({"a": "b"}, 0.5)
    assert (answer["error"], answer["store"]) == (None, True)
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hello, world!", "annotations": [], "logprobs": []}]
    assert prompt(backend) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    num_input, num_output = len(backend.last.token_ids), len(token_ids("Hello, world!")) + 1
    assert answer["usage"] == {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_input + num_output,
        "penstock": {"coalesced": False},
    }


async def test_events_come_in_openais_order(connection: ClientConnection) -> None:
    events = named_events(await connection.post(PATH, {**HI, "stream": True}))
    assert names(events) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "".join(event["delta"] for event in events if event["type"].endswith("delta")) == "Hello, world!"


async def test_reasoning_text_and_calls_are_consecutive_items() -> None:
    backend = FakeBackend(script=MODEL.says(REASONED_CALLS))
    async with talking(backend) as connection:
        body = {**HI, "tools": [WEATHER, TIME], "stream": True, "reasoning": {"effort": "low"}}
        events = named_events(await connection.post(PATH, body))
    item = ["response.output_item.added", "response.content_part.added"]
    done = ["response.content_part.done", "response.output_item.done"]
    called = ["response.function_call_arguments.delta", "response.function_call_arguments.done"]
    assert names(events)[2:-1] == [
        *item,
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        *done,
        *item,
        "response.output_text.delta",
        "response.output_text.done",
        *done,
        item[0],
        *called,
        done[1],
        item[0],
        *called,
        done[1],
    ]
    output = events[-1]["response"]["output"]
    assert [entry["type"] for entry in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Hm, 猫."}]
    assert [(entry["name"], json.loads(entry["arguments"])) for entry in output[2:]] == [
        ("get_weather", {"city": "été 🐈"}),
        ("get_time", {}),
    ]
    assert events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    finished = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [entry["id"] for entry in added] == [entry["id"] for entry in finished]
    assert finished == output


TEXTS = st.lists(
    st.sampled_from(["Hello", " 猫", "\n", "🐈", "<think>", "</think>", "<tool_call>", "the cat "]), max_size=8
).map("".join)
CALLS = st.sampled_from(
    ["", '<tool_call>\n{"name": "get_time", "arguments": {"a": [1, "é"]}}\n</tool_call>', "<tool_call>\n{broken"]
)


@settings(max_examples=60)
@given(TEXTS, CALLS, CALLS, st.sampled_from([1, 2, 7, 1000]), st.sampled_from([Finish.STOP, Finish.LENGTH]))
async def test_streamed_and_whole_answers_are_equal(
    text: str, first: str, second: str, batch_size: int, finish: Finish
) -> None:
    output = f"x{text}{first}{second}"
    backend = FakeBackend(script=MODEL.says(output, batch_size=batch_size, finish=finish))
    async with talking(backend) as connection:
        body = {**HI, "tools": [WEATHER, TIME]}
        whole = (await connection.post(PATH, body)).json()
        events = named_events(await connection.post(PATH, {**body, "stream": True}))
    streamed = events[-1]["response"]
    assert without_ids(streamed) == without_ids(whole)
    pieces: dict[int, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            pieces[event["output_index"]] = pieces.get(event["output_index"], "") + event["delta"]
    for index, item in enumerate(streamed["output"]):
        expected = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert pieces.get(index, "") == expected


async def test_truncated_answer_is_incomplete(connection: ClientConnection) -> None:
    body = {**HI, "max_output_tokens": 3}
    answer = (await connection.post(PATH, body)).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (answer["output"][0]["status"], answer["completed_at"]) == ("incomplete", None)
    last = named_events(await connection.post(PATH, {**body, "stream": True}))[-1]
    assert last["type"] == "response.incomplete"
    assert without_ids(last["response"]) == without_ids(answer)


async def test_empty_answer_has_an_empty_message(connection: ClientConnection, backend: FakeBackend) -> None:
    backend.script = says("")
    answer = (await connection.post(PATH, HI)).json()
    assert answer["output"][0]["content"][0]["text"] == ""
    assert without_ids(named_events(await connection.post(PATH, {**HI, "stream": True}))[-1]["response"]) == (
        without_ids(answer)
    )


async def test_failure_in_a_stream_is_its_last_event(connection: ClientConnection, backend: FakeBackend) -> None:
    failure = TokenBatch([], Finish.FAILED, FailureCode.INTERNAL)
    backend.script = lambda _: [TokenBatch(token_ids("a")), failure]
    events = named_events(await connection.post(PATH, {**HI, "stream": True}))
    assert events[-1]["type"] == "response.failed"
    answer = events[-1]["response"]
    assert (answer["status"], answer["error"]["code"], answer["output"][0]["status"]) == (
        "failed",
        "server_error",
        "incomplete",
    )
    assert (await connection.request("GET", f"{PATH}/{answer['id']}")).json() == answer
    whole = await connection.post(PATH, HI)
    assert (whole.status, whole.error["code"]) == (500, "internal_error")


async def test_logprobs_come_with_the_text(connection: ClientConnection, backend: FakeBackend) -> None:
    ids = token_ids("Hello")

    def script(request: Any) -> list[TokenBatch]:
        logprobs = [LogprobEntry(-0.5, 1, (token,), (-0.5,)) for token in ids]
        batches = [TokenBatch([token], logprobs=[logprob]) for token, logprob in zip(ids, logprobs, strict=True)]
        return [*batches, TokenBatch([END_TOKEN], Finish.STOP, logprobs=[LogprobEntry(-1.0, 1)])]

    backend.script = script
    body = {**HI, "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    (part,) = (await connection.post(PATH, body)).json()["output"][0]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == "Hello"
    assert [set(entry) for entry in part["logprobs"]] == [{"token", "bytes", "logprob", "top_logprobs"}] * len(ids)
    assert backend.last.sampling.num_logprobs == 1
    events = named_events(await connection.post(PATH, {**body, "stream": True}))
    streamed = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    assert streamed == part["logprobs"]
    assert events[-1]["response"]["output"][0]["content"] == [part]


async def test_every_kind_of_item_reaches_the_model() -> None:
    backend = FakeBackend(script=MODEL.says("ok"))
    items = [
        {"role": "developer", "content": "be brief"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I call", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "get_time", "arguments": '{"zone": 1}', "id": "fc_1"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "user", "content": "and?"},
    ]
    async with talking(backend) as connection:
        response = await connection.post(PATH, {"input": items, "instructions": "Be kind."})
    assert response.status == 200, response.body
    assert prompt(backend, MODEL) == (
        "<|im_start|>system\nBe kind.\n\nbe brief<|im_end|>\n"
        "<|im_start|>user\na\nb<|im_end|>\n"
        '<|im_start|>assistant\nI call\n<tool_call>\n{"name": "get_time", "arguments": {"zone": 1}}\n</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nnoon\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_too_long_conversation_loses_its_oldest_turns(
    connect: Callable[..., ClientConnection], backend: FakeBackend
) -> None:
    def turns(number: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"<{number}>" + "x" * 60}, {"role": "assistant", "content": "y" * 60}]

    items = [item for number in range(20) for item in turns(number)][:-1]
    connection = connect()
    body = {"input": items, "instructions": "be brief", "max_output_tokens": 200}
    refused = await connection.post(PATH, body)
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
    answer = await connection.post(PATH, {**body, "truncation": "auto"})
    assert (answer.status, answer.json()["truncation"]) == (200, "auto")
    text, num_tokens = prompt(backend), len(backend.last.token_ids)
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n<")
    assert "<19>" in text
    assert num_tokens + 200 <= 1000
    turn = len(token_ids("<|im_start|>user\n<10>" + "x" * 60 + "<|im_end|>\n<|im_start|>assistant\n" + "y" * 60))
    assert num_tokens + turn + 200 > 1000 - 10
    alone = await connection.post(PATH, {"input": "x" * 2000, "truncation": "auto"})
    assert (alone.status, alone.error["param"]) == (400, "input")
    assert (await connection.post(PATH, {**HI, "truncation": "auto"})).status == 200


@pytest.mark.parametrize("effort", ["none", "high"])
async def test_effort_none_turns_thinking_off(effort: str) -> None:
    backend = FakeBackend(script=MODEL.says("ok"))
    async with talking(backend) as connection:
        await connection.post(PATH, {**HI, "reasoning": {"effort": effort, "summary": "auto"}})
    assert prompt(backend, MODEL).endswith("</think>\n\n") is (effort == "none")


async def test_schema_becomes_a_grammar(connection: ClientConnection, backend: FakeBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    answer = (await connection.post(PATH, {**HI, "text": {"format": form, "verbosity": "low"}})).json()
    assert answer["text"]["format"] == form
    constraints = backend.last.constraints
    assert constraints is not None
    assert constraints.grammar is not None
    assert json.loads(constraints.grammar.text) == schema


async def test_only_allowed_tools_reach_the_model() -> None:
    backend = FakeBackend(script=MODEL.says("ok"))
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
    async with talking(backend) as connection:
        response = await connection.post(PATH, {**HI, "tools": [WEATHER, TIME], "tool_choice": choice})
    assert response.json()["tool_choice"] == choice
    assert "get_time" in prompt(backend, MODEL)
    assert "get_weather" not in prompt(backend, MODEL)


# Refused requests


@pytest.mark.parametrize(
    ("body", "param", "shown"),
    [
        ({}, "input", "required"),
        ({"input": 5}, "input", "5"),
        ({"input": []}, "input", "at least one"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "robot"),
        ({"input": [{"content": "x"}]}, "input[0].role", "required"),
        ({"input": [{"role": "user"}]}, "input[0].content", "required"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].image_url",
            "takes no pictures",
        ),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "required"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type", "web_search_call"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id", "required"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, "input[0].arguments", "required"),
        (
            {"input": [{"type": "function_call", "call_id": "x", "name": "f g", "arguments": ""}]},
            "input[0].name",
            "f g",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "required"),
        ({**HI, "max_output_tokens": 0}, "max_output_tokens", "0"),
        ({**HI, "max_output_tokens": 5000}, "max_output_tokens", "1000"),
        ({"input": "x" * 5000}, "input", "1000"),
        ({**HI, "temperature": 3}, "temperature", "3"),
        ({**HI, "top_p": 0}, "top_p", "0"),
        ({**HI, "top_logprobs": 21}, "top_logprobs", "21"),
        ({**HI, "include": ["x"]}, "include[0]", "x"),
        ({**HI, "n": 2}, "n", "2"),
        ({**HI, "tools": [{"type": "mcp"}]}, "tools[0].type", "mcp"),
        ({**HI, "tools": [{"type": "function"}]}, "tools[0].name", "required"),
        ({**HI, "tools": [TIME, TIME]}, "tools[1].name", "get_time"),
        ({**HI, "tool_choice": "some"}, "tool_choice", "some"),
        ({**HI, "tool_choice": "required"}, "tool_choice", "tools"),
        ({**HI, "tool_choice": {"type": "mcp"}}, "tool_choice.type", "mcp"),
        ({**HI, "tool_choice": {"type": "function"}}, "tool_choice.name", "required"),
        ({**HI, "tools": [TIME], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name", "f"),
        ({**HI, "text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "required"),
        ({**HI, "text": {"format": {"type": "xml"}}}, "text.format.type", "xml"),
        ({**HI, "text": {"verbosity": "loud"}}, "text.verbosity", "loud"),
        ({**HI, "reasoning": {"effort": "huge"}}, "reasoning.effort", "huge"),
        ({**HI, "truncation": "some"}, "truncation", "some"),
        ({**HI, "background": True, "store": False}, "background", "store"),
        ({**HI, "stream_options": {"include_obfuscation": False}}, "stream_options", "stream"),
        ({**HI, "conversation": "conv_1"}, "conversation", "not supported"),
        ({**HI, "prompt": {"id": "p"}}, "prompt", "not supported"),
        ({**HI, "context_management": [{"type": "compaction"}]}, "context_management", "not supported"),
        ({**HI, "response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({**HI, "max_tokens": 5}, "max_tokens", "not supported"),
        ({**HI, "metadata": {"a": 1}}, "metadata[...]", "int"),
        ({**HI, "model": "other"}, "model", "other"),
    ],
)
async def test_invalid_field_is_named(
    connection: ClientConnection, body: dict[str, Any], param: str, shown: str
) -> None:
    for stream in (False, True) if param != "stream_options" else (False,):
        response: Response = await connection.post(PATH, {**body, "stream": stream})
        assert response.status == (404 if param == "model" else 400), response.body
        assert response.error["param"] == param
        assert shown in response.error["message"]


async def test_input_tokens_are_counted(connection: ClientConnection, backend: FakeBackend) -> None:
    answer = (await connection.post(f"{PATH}/input_tokens", HI)).json()
    await connection.post(PATH, HI)
    assert answer == {"object": "response.input_tokens", "input_tokens": len(backend.last.token_ids)}
