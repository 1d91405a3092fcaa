"""Anthropic's Messages API as a client sees it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest
from hypothesis import given, settings

from frontend.dialects import anthropic_error
from frontend.errors import ApiError, ErrorKind
from shm.client import BackendUnavailable, Overloaded, TokenBatch
from shm.wire import FailureCode, Finish
from tests.frontend.harness import Connection, FakeBackend, Response, says, silent, token_ids
from tests.frontend.named_events import REASONED_CALLS, named_events, names
from tests.frontend.test_responses import CALLED, MODEL, SAID, prompt, talking

PATH = "/v1/messages"
HI: dict[str, Any] = {"max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]}
WEATHER: dict[str, Any] = {"name": "get_weather", "input_schema": {"type": "object"}}
TIME: dict[str, Any] = {"name": "get_time", "description": "now", "input_schema": {"type": "object"}, "type": "custom"}
KEYS = {"type", "error", "request_id"}
API_DOC = (
    (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8").partition("\n## /v1/messages\n")[2]
)


def error(response: Response) -> dict[str, Any]:
    """Anthropic's error object, wherever it is told."""
    body = response.json()
    assert set(body) == KEYS
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert set(body["error"]) == {"type", "message"}
    told: dict[str, Any] = body["error"]
    return told


async def test_a_message_is_answered_whole(connection: Connection, backend: FakeBackend) -> None:
    response = await connection.post(PATH, {**HI, "model": "test/model", "metadata": {"user_id": "u"}})
    told = response.json()
    assert response.status == 200
    assert told.pop("id").startswith("msg_")
    num_output = len(token_ids("Hello, world!")) + 1
    assert told == {
        "type": "message",
        "role": "assistant",
        "model": "test/model",
        "content": [{"type": "text", "text": "Hello, world!"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(backend.last.token_ids) - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": num_output,
            "output_tokens_details": {"thinking_tokens": 0},
        },
    }
    assert backend.last.max_tokens == 500
    assert response.headers["request-id"] == response.headers["x-request-id"]


async def test_the_events_come_in_anthropics_order(connection: Connection) -> None:
    events = named_events(await connection.post(PATH, {**HI, "stream": True}))
    assert names(events) == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


async def test_thinking_text_and_calls_are_blocks_one_after_the_other() -> None:
    backend = FakeBackend(script=MODEL.says(REASONED_CALLS))
    body = {**HI, "tools": [WEATHER, TIME], "thinking": {"type": "enabled", "budget_tokens": 100}}
    async with talking(backend) as connection:
        told = (await connection.post(PATH, body)).json()
        events = named_events(await connection.post(PATH, {**body, "stream": True}))
    thinking, text, weather, time = told["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm, 猫.")
    assert thinking["signature"]
    assert text == {"type": "text", "text": "I look it up."}
    assert (weather["type"], weather["name"], weather["input"]) == ("tool_use", "get_weather", {"city": "été 🐈"})
    assert (time["name"], time["input"]) == ("get_time", {})
    assert told["stop_reason"] == "tool_use"
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in starts] == ["thinking", "text", "tool_use", "tool_use"]
    assert starts[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[2]["input"] == {}
    kinds = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert list(dict.fromkeys(kinds)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2, 3]


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together."""
    message: dict[str, Any] = dict(events[0]["message"])
    content: list[dict[str, Any]] = []
    raw: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(content)
                content.append(dict(event["content_block"]))
            case "content_block_delta":
                block = content[event["index"]]
                delta = event["delta"]
                for field in ("text", "thinking", "signature"):
                    block[field] = block.get(field, "") + delta.get(field, "")
                raw[event["index"]] = raw.get(event["index"], "") + delta.get("partial_json", "")
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
    for index, block in enumerate(content):
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(raw.get(index, ""))
            except ValueError:
                block["input"] = {}
    return comparable({**message, "content": content})


def comparable(message: dict[str, Any]) -> dict[str, Any]:
    """Without ids, and of each block what belongs to its kind."""
    fields = {"text": ("text",), "thinking": ("thinking",), "tool_use": ("name", "input")}
    content = [{name: block[name] for name in ("type", *fields[block["type"]])} for block in message["content"]]
    return {name: value for name, value in message.items() if name != "id"} | {"content": content}


@settings(max_examples=25, deadline=None)
@given(SAID, CALLED, CALLED)
@pytest.mark.parametrize(("batch_size", "finish"), [(1, Finish.STOP), (3, Finish.LENGTH), (1000, Finish.STOP)])
async def test_a_stream_tells_what_a_whole_answer_tells(
    batch_size: int, finish: Finish, said: str, first: str, second: str
) -> None:
    backend = FakeBackend(script=MODEL.says(f"x{said}{first}{second}", batch_size=batch_size, finish=finish))
    async with talking(backend) as connection:
        body = {**HI, "tools": [WEATHER, TIME], "thinking": {"type": "adaptive"}}
        whole = (await connection.post(PATH, body)).json()
        events = named_events(await connection.post(PATH, {**body, "stream": True}))
    assert assembled(events) == comparable(whole)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("changes", "reason", "sequence"),
    [
        ({"stop_sequences": ["wor"]}, "stop_sequence", "wor"),
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["zzz"]}, "end_turn", None),
        ({"stop_sequences": []}, "end_turn", None),
    ],
)
async def test_why_it_stopped_is_told(
    connection: Connection, changes: dict[str, Any], reason: str, sequence: str | None, stream: bool
) -> None:
    response = await connection.post(PATH, {**HI, **changes, "stream": stream})
    told = assembled(named_events(response)) if stream else response.json()
    assert (told["stop_reason"], told["stop_sequence"]) == (reason, sequence)
    if sequence is not None:
        assert told["content"][0]["text"] == "Hello, "


async def test_every_kind_of_block_reaches_the_model() -> None:
    backend = FakeBackend(script=MODEL.says("ok"))
    cached = {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}
    called = {"type": "tool_use", "id": "t1", "name": "get_time", "input": {"zone": 1}}
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": [{"type": "text", "text": "noon"}],
        "is_error": False,
    }
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I call"},
                called,
            ],
        },
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
    ]
    async with talking(backend) as connection:
        response = await connection.post(PATH, {**HI, "system": [cached], "messages": messages})
    assert response.status == 200, response.body
    assert prompt(backend, MODEL) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n"
        "<|im_start|>user\na\nb<|im_end|>\n"
        '<|im_start|>assistant\nI call\n<tool_call>\n{"name": "get_time", "arguments": {"zone": 1}}\n</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nnoon\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


async def test_a_last_message_of_the_assistants_is_gone_on_with(connection: Connection, backend: FakeBackend) -> None:
    messages = [*HI["messages"], {"role": "assistant", "content": "I say: "}]
    assert (await connection.post(PATH, {**HI, "messages": messages})).status == 200
    assert prompt(backend).endswith("<|im_start|>assistant\nI say:")


async def test_a_call_cannot_be_gone_on_with() -> None:
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
    async with talking(FakeBackend(script=MODEL.says("ok"))) as connection:
        refused = await connection.post(PATH, {**HI, "messages": [*HI["messages"], called]})
    assert refused.status == 400
    assert error(refused)["message"].startswith("messages: ")


@pytest.mark.parametrize(
    ("thinking", "thinks"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, True),
        ({"type": "enabled", "budget_tokens": 9}, True),
    ],
)
async def test_only_who_asks_for_thinking_gets_it(thinking: dict[str, Any] | None, thinks: bool) -> None:
    backend = FakeBackend(script=MODEL.says("ok"))
    async with talking(backend) as connection:
        assert (await connection.post(PATH, {**HI, "thinking": thinking})).status == 200
    assert prompt(backend, MODEL).endswith("</think>\n\n") is not thinks
    constraints = backend.last.constraints
    budget = 0 if constraints is None else constraints.thinking_budget_tokens
    assert budget == (9 if thinking == {"type": "enabled", "budget_tokens": 9} else 0)


@pytest.mark.parametrize(
    ("choice", "is_forced", "is_told"),
    [
        ({"type": "auto"}, False, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True, True),
        ({"type": "tool", "name": "get_time"}, True, True),
        ({"type": "none"}, False, False),
    ],
)
async def test_the_choice_of_tools(choice: dict[str, Any], is_forced: bool, is_told: bool) -> None:
    backend = FakeBackend(script=MODEL.says("ok"))
    async with talking(backend) as connection:
        body = {**HI, "tools": [WEATHER, TIME], "tool_choice": choice}
        assert (await connection.post(PATH, body)).status == 200
    constraints = backend.last.constraints
    grammar = None if constraints is None else constraints.grammar
    assert (grammar is not None and '"get_weather"' in grammar.text.replace("\\", "")) is (
        is_forced and choice["type"] == "any"
    )
    assert (grammar is not None) >= is_forced
    text = MODEL.says(REASONED_CALLS)
    backend.script = text
    async with talking(backend) as connection:
        told = (await connection.post(PATH, body)).json()
    assert any(block["type"] == "tool_use" for block in told["content"]) is is_told


async def test_an_output_format_becomes_a_grammar(connection: Connection, backend: FakeBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {**HI, "output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}}
    assert (await connection.post(PATH, body)).status == 200
    constraints = backend.last.constraints
    assert constraints is not None
    assert constraints.grammar is not None
    assert json.loads(constraints.grammar.text) == schema


async def test_tokens_are_counted_as_a_message_would_have_them(connection: Connection, backend: FakeBackend) -> None:
    body = {"messages": HI["messages"], "system": "be brief"}
    told = (await connection.post(f"{PATH}/count_tokens", body)).json()
    await connection.post(PATH, {**HI, **body})
    assert told == {"input_tokens": len(backend.last.token_ids)}
    refused = await connection.post(f"{PATH}/count_tokens", {"messages": [], "model": "x"})
    assert error(refused)["type"] == "invalid_request_error"


# Errors


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_a_key_comes_in_either_header(connect: Callable[..., Connection], header: str) -> None:
    connection = connect(api_keys=("right",))
    scheme = "Bearer " if header == "authorization" else ""
    version = ("anthropic-version", "2023-06-01")
    good = await connection.request("POST", PATH, HI, [(header, f"{scheme}right"), version])
    assert good.status == 200
    bad = await connection.request("POST", PATH, HI, [(header, f"{scheme}wrong"), version])
    assert (bad.status, error(bad)["type"]) == (401, "authentication_error")
    missing = await connection.request("POST", PATH, HI)
    assert (missing.status, error(missing)["type"]) == (401, "authentication_error")


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "kind"),
    [
        ("POST", f"{PATH}/batches", HI, 404, "not_found_error"),
        ("GET", PATH, None, 405, "invalid_request_error"),
        ("POST", PATH, b"{", 400, "invalid_request_error"),
        ("POST", PATH, b"\xff", 400, "invalid_request_error"),
        ("POST", PATH, {**HI, "model": "other"}, 404, "not_found_error"),
        ("POST", PATH, b" " * 3000, 413, "request_too_large"),
    ],
)
async def test_every_error_is_anthropics(
    connect: Callable[..., Connection], method: str, path: str, body: Any, status: int, kind: str
) -> None:
    refused = await connect(max_body_bytes=2000).request(method, path, body)
    assert (refused.status, error(refused)["type"]) == (status, kind)


@pytest.mark.parametrize("kind", ErrorKind)
def test_every_error_has_a_type_of_anthropics(kind: ErrorKind) -> None:
    status, body = anthropic_error(ApiError(kind, "why"), "r1")
    assert status == (529 if kind is ErrorKind.OVERLOADED else kind.status)
    told = json.loads(body)
    assert (told["type"], told["request_id"], told["error"]["message"]) == ("error", "r1", "why")
    if status != 413:  # of which the SDK's types know nothing, but Anthropic's pages do
        anthropic.types.ErrorResponse.model_validate(told)
    rows = re.findall(r"^\| ([\d, ]+) \| `(\w+)`", API_DOC, flags=re.MULTILINE)
    assert next(name for statuses, name in rows if str(status) in statuses.split(", ")) == told["error"]["type"]


async def test_errors_of_the_system_are_anthropics(connection: Connection, backend: FakeBackend) -> None:
    backend.refusal = Overloaded(7)
    full = await connection.post(PATH, HI)
    assert (full.status, error(full)["type"], full.headers["retry-after"]) == (529, "overloaded_error", "7")
    backend.refusal = BackendUnavailable()
    gone = await connection.post(PATH, HI)
    assert (gone.status, error(gone)["type"]) == (503, "api_error")
    backend.refusal = None
    backend.script = lambda _: [TokenBatch([], Finish.EXPIRED)]
    late = await connection.post(PATH, HI)
    assert (late.status, error(late)["type"]) == (499, "timeout_error")
    backend.script = lambda _: [TokenBatch([], Finish.FAILED, FailureCode.INTERNAL)]
    failed = await connection.post(PATH, HI)
    assert (failed.status, error(failed)["type"]) == (500, "api_error")


async def test_what_fails_in_a_stream_is_its_last_event(connection: Connection, backend: FakeBackend) -> None:
    failure = TokenBatch([], Finish.FAILED, FailureCode.OVERLOADED)
    backend.script = lambda _: [TokenBatch(token_ids("a")), failure]
    response = await connection.post(PATH, {**HI, "stream": True})
    last = named_events(response)[-1]
    assert set(last) == KEYS
    assert last["error"]["type"] == "overloaded_error"
    assert last["request_id"] == response.headers["request-id"]


async def test_a_client_that_goes_cancels_its_message(connection: Connection, backend: FakeBackend) -> None:
    backend.script = silent
    data = json.dumps({**HI, "stream": True}).encode()
    connection.send(b"POST /v1/messages HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))
    await backend.submitted.wait()
    connection.transport.reset()
    await asyncio.wait_for(backend.streams[0].cancelled.wait(), 5)


def said(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {**HI, "messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("body", "param", "shown"),
    [
        ({"messages": HI["messages"]}, "max_tokens", "required"),
        ({"max_tokens": 5}, "messages", "required"),
        ({**HI, "messages": []}, "messages", "length"),
        ({**HI, "messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "tool"),
        ({**HI, "messages": [{"role": "user", "content": []}]}, "messages", "no content"),
        (said({"type": "image", "source": {}}), "messages[0].content[0].type", "image"),
        (said({"type": "document", "source": {}}), "messages[0].content[0].type", "document"),
        (said({"type": "text"}), "messages[0].content[0].text", "required"),
        (said({"type": "tool_use", "id": "x", "name": "f", "input": {}}), "messages[0].content[0].type", "tool_use"),
        (
            said({"type": "tool_use", "id": "x", "name": "f"}, role="assistant"),
            "messages[0].content[0].input",
            "required",
        ),
        (said({"type": "tool_result"}), "messages[0].content[0].tool_use_id", "required"),
        (
            said({"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}),
            "messages[0].content[0].content[0].type",
            "image",
        ),
        ({**HI, "system": [{"type": "image"}]}, "system[0].type", "image"),
        ({**HI, "max_tokens": 0}, "max_tokens", "0"),
        ({**HI, "max_tokens": 5000}, "max_tokens", "1000"),
        ({**HI, "messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "1000"),
        ({**HI, "temperature": -1}, "temperature", "-1"),
        ({**HI, "top_k": -2}, "top_k", "-2"),
        ({**HI, "stop_sequences": ["x"] * 17}, "stop_sequences", "16"),
        ({**HI, "stop_sequences": [""]}, "stop_sequences[0]", ">= 1"),
        ({**HI, "stop": ["x"]}, "stop", "not supported"),
        ({**HI, "n": 2}, "n", "not supported"),
        ({**HI, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "bash_20250124"),
        ({**HI, "tools": [{"name": "f"}]}, "tools[0].input_schema", "required"),
        ({**HI, "tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type", "object"),
        ({**HI, "tools": [TIME, TIME]}, "tools[1].name", "get_time"),
        ({**HI, "tool_choice": {"type": "some"}}, "tool_choice.type", "some"),
        ({**HI, "tools": [TIME], "tool_choice": {"type": "tool"}}, "tool_choice.name", "required"),
        ({**HI, "tools": [TIME], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name", "f"),
        ({**HI, "tool_choice": {"type": "any"}}, "tool_choice", "tools"),
        ({**HI, "thinking": {"type": "enabled"}}, "thinking.budget_tokens", "required"),
        ({**HI, "thinking": {"type": "enabled", "budget_tokens": 500}}, "thinking.budget_tokens", "500"),
        ({**HI, "thinking": {"type": "sometimes"}}, "thinking.type", "sometimes"),
        ({**HI, "output_config": {"effort": "huge"}}, "output_config.effort", "huge"),
        ({**HI, "output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "required"),
        ({**HI, "mcp_servers": [{"type": "url"}]}, "mcp_servers", "not supported"),
        ({**HI, "container": "x"}, "container", "not supported"),
        ({**HI, "metadata": {"user_id": 5}}, "metadata.user_id", "5"),
        ({**HI, "stream": "yes"}, "stream", "yes"),
    ],
)
async def test_what_is_wrong_is_named(connection: Connection, body: dict[str, Any], param: str, shown: str) -> None:
    response = await connection.post(PATH, body)
    assert response.status == 400
    told = error(response)
    assert told["type"] == "invalid_request_error"
    assert told["message"].startswith(f"{param}: "), told["message"]
    assert shown in told["message"]


async def test_an_answer_of_nothing_has_no_content(connection: Connection, backend: FakeBackend) -> None:
    backend.script = says("")
    assert (await connection.post(PATH, HI)).json()["content"] == []
    events = named_events(await connection.post(PATH, {**HI, "stream": True}))
    assert names(events) == ["message_start", "message_delta", "message_stop"]
