"""Anthropic's Messages API as a client sees it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings

from penstock.shm.messages import Finish
from tests.frontend.endpoints.responses.test_responses import CALLS, MODEL, TEXTS, prompt, talking
from tests.frontend.harness import ClientConnection, FakeBackend, Response, says, token_ids
from tests.frontend.named_events import REASONED_CALLS, named_events, names

PATH = "/v1/messages"
HI: dict[str, Any] = {"max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]}
WEATHER: dict[str, Any] = {"name": "get_weather", "input_schema": {"type": "object"}}
TIME: dict[str, Any] = {"name": "get_time", "description": "now", "input_schema": {"type": "object"}, "type": "custom"}
KEYS = {"type", "error", "request_id"}


def error(response: Response) -> dict[str, Any]:
    """Check and return Anthropic's error object."""
    body = response.json()
    assert set(body) == KEYS
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert set(body["error"]) == {"type", "message"}
    found: dict[str, Any] = body["error"]
    return found


async def test_message_is_answered_whole(connection: ClientConnection, backend: FakeBackend) -> None:
    response = await connection.post(PATH, {**HI, "model": "test/model", "metadata": {"user_id": "u"}})
    answer = response.json()
    assert response.status == 200
    assert answer.pop("id").startswith("msg_")
    num_output = len(token_ids("Hello, world!")) + 1
    assert answer == {
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


async def test_events_come_in_anthropics_order(connection: ClientConnection) -> None:
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


async def test_thinking_text_and_calls_are_consecutive_blocks() -> None:
    backend = FakeBackend(script=MODEL.says(REASONED_CALLS))
    body = {**HI, "tools": [WEATHER, TIME], "thinking": {"type": "enabled", "budget_tokens": 100}}
    async with talking(backend) as connection:
        answer = (await connection.post(PATH, body)).json()
        events = named_events(await connection.post(PATH, {**body, "stream": True}))
    thinking, text, weather, time = answer["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "Hm, 猫.")
    assert thinking["signature"]
    assert text == {"type": "text", "text": "I look it up."}
    assert (weather["type"], weather["name"], weather["input"]) == ("tool_use", "get_weather", {"city": "été 🐈"})
    assert (time["name"], time["input"]) == ("get_time", {})
    assert answer["stop_reason"] == "tool_use"
    starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in starts] == ["thinking", "text", "tool_use", "tool_use"]
    assert starts[0] == {"type": "thinking", "thinking": "", "signature": ""}
    assert starts[2]["input"] == {}
    kinds = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert list(dict.fromkeys(kinds)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    assert [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2, 3]


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a client assembles from the events."""
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
    """Return the message without ids; each block keeps only the fields of its type."""
    fields = {"text": ("text",), "thinking": ("thinking",), "tool_use": ("name", "input")}
    content = [{name: block[name] for name in ("type", *fields[block["type"]])} for block in message["content"]]
    return {name: value for name, value in message.items() if name != "id"} | {"content": content}


@settings(max_examples=25)
@given(TEXTS, CALLS, CALLS)
@pytest.mark.parametrize(("batch_size", "finish"), [(1, Finish.STOP), (3, Finish.LENGTH), (1000, Finish.STOP)])
async def test_streamed_and_whole_answers_are_equal(
    batch_size: int, finish: Finish, text: str, first: str, second: str
) -> None:
    backend = FakeBackend(script=MODEL.says(f"x{text}{first}{second}", batch_size=batch_size, finish=finish))
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
async def test_stop_reason_is_reported(
    connection: ClientConnection, changes: dict[str, Any], reason: str, sequence: str | None, stream: bool
) -> None:
    response = await connection.post(PATH, {**HI, **changes, "stream": stream})
    answer = assembled(named_events(response)) if stream else response.json()
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
    if sequence is not None:
        assert answer["content"][0]["text"] == "Hello, "


@pytest.mark.parametrize("stream", [False, True])
async def test_limit_beyond_the_context_stops_at_its_end(stream: bool) -> None:
    # Claude Code asks for 64,000 tokens and more, whatever the model.
    backend = FakeBackend(script=MODEL.says("a 1 " * 4000, batch_size=500))
    async with talking(backend) as connection:
        response = await connection.post(PATH, {**HI, "max_tokens": 64_000, "stream": stream})
    answer = assembled(named_events(response)) if stream else response.json()
    assert answer["stop_reason"] == "model_context_window_exceeded"
    assert len(backend.last.token_ids) + backend.last.max_tokens == MODEL.served(backend).card.max_context_tokens


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


async def test_last_assistant_message_is_continued(connection: ClientConnection, backend: FakeBackend) -> None:
    messages = [*HI["messages"], {"role": "assistant", "content": "I say: "}]
    assert (await connection.post(PATH, {**HI, "messages": messages})).status == 200
    assert prompt(backend).endswith("<|im_start|>assistant\nI say: ")


async def test_tool_call_cannot_be_continued() -> None:
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
async def test_thinking_is_off_unless_requested(thinking: dict[str, Any] | None, thinks: bool) -> None:
    backend = FakeBackend(script=MODEL.says("ok"))
    async with talking(backend) as connection:
        assert (await connection.post(PATH, {**HI, "thinking": thinking})).status == 200
    assert prompt(backend, MODEL).endswith("</think>\n\n") is not thinks
    constraints = backend.last.constraints
    budget = 0 if constraints is None else constraints.thinking_budget_tokens
    assert budget == (9 if thinking == {"type": "enabled", "budget_tokens": 9} else 0)


@pytest.mark.parametrize(
    ("choice", "is_forced", "reads_calls"),
    [
        ({"type": "auto"}, False, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True, True),
        ({"type": "tool", "name": "get_time"}, True, True),
        ({"type": "none"}, False, False),
    ],
)
async def test_tool_choice_reaches_the_model(choice: dict[str, Any], is_forced: bool, reads_calls: bool) -> None:
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
        answer = (await connection.post(PATH, body)).json()
    assert any(block["type"] == "tool_use" for block in answer["content"]) is reads_calls


async def test_output_format_becomes_a_grammar(connection: ClientConnection, backend: FakeBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {**HI, "output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}}
    assert (await connection.post(PATH, body)).status == 200
    constraints = backend.last.constraints
    assert constraints is not None
    assert constraints.grammar is not None
    assert json.loads(constraints.grammar.text) == schema


async def test_counted_tokens_equal_the_messages_prompt(connection: ClientConnection, backend: FakeBackend) -> None:
    body = {"messages": HI["messages"], "system": "be brief"}
    answer = (await connection.post(f"{PATH}/count_tokens", body)).json()
    await connection.post(PATH, {**HI, **body})
    assert answer == {"input_tokens": len(backend.last.token_ids)}
    refused = await connection.post(f"{PATH}/count_tokens", {"messages": [], "model": "x"})
    assert error(refused)["type"] == "invalid_request_error"


async def test_empty_answer_has_no_content(connection: ClientConnection, backend: FakeBackend) -> None:
    backend.script = says("")
    assert (await connection.post(PATH, HI)).json()["content"] == []
    events = named_events(await connection.post(PATH, {**HI, "stream": True}))
    assert names(events) == ["message_start", "message_delta", "message_stop"]
