"""Requests as clients of other servers send them: other field names, longer tool names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.frontend.endpoints.responses.test_responses import talking
from tests.frontend.harness import ClientConnection, FakeBackend
from tests.frontend.model_families import ALWAYS_THINKING, HERMES, Model

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"
THINKING = Model(ALWAYS_THINKING)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
LONG_NAME = "mcp__plugin_" + "x" * 116


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**HI, "tools": [{"type": "function", "function": {"name": LONG_NAME}}]}),
        ("/v1/messages", {**HI, "max_tokens": 500, "tools": [{"name": LONG_NAME, "input_schema": {"type": "object"}}]}),
        ("/v1/responses", {"input": "hi", "tools": [{"type": "function", "name": LONG_NAME}]}),
    ],
)
async def test_tool_name_may_contain_its_servers_name(path: str, body: dict[str, Any]) -> None:
    call = f'<tool_call>\n{{"name": "{LONG_NAME}", "arguments": {{"a": 1}}}}\n</tool_call>'
    backend = FakeBackend(script=Model(HERMES).says(call))
    async with talking(backend, Model(HERMES)) as connection:
        response = await connection.post(path, body)
        assert response.status == 200
        assert f'"{LONG_NAME}"'.encode() in response.body
        too_long = json.loads(json.dumps(body).replace(LONG_NAME, LONG_NAME + "x"))
        assert (await connection.post(path, too_long)).status == 400


def requested_schema(backend: FakeBackend) -> Any:
    constraints = backend.last.constraints
    assert constraints is not None
    assert constraints.grammar is not None
    assert constraints.grammar.kind == "json_schema"
    return json.loads(constraints.grammar.text)


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
async def test_schema_next_to_the_response_format_type_is_read(
    connection: ClientConnection, backend: FakeBackend, kind: str
) -> None:
    form = {"type": kind, "schema": SCHEMA}
    for path, body in ((CHAT, HI), ("/v1/completions", {"prompt": "hi"})):
        assert (await connection.post(path, {**body, "response_format": form})).status == 200
        assert requested_schema(backend) == SCHEMA
    both = await connection.post(CHAT, {**HI, "response_format": {**form, "json_schema": {"schema": SCHEMA}}})
    assert (both.status, both.error["param"]) == (400, "response_format.schema")


async def test_output_format_of_anthropics_beta_is_read(connection: ClientConnection, backend: FakeBackend) -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    body = {**HI, "max_tokens": 50}
    assert (await connection.post("/v1/messages", {**body, "output_format": form})).status == 200
    assert requested_schema(backend) == SCHEMA
    both = {**body, "output_format": form, "output_config": {"format": form}}
    assert (await connection.post("/v1/messages", both)).status == 400
    assert (await connection.post("/v1/messages", {**both, "output_config": {"effort": "low"}})).status == 200


async def test_vllms_name_for_the_thinking_budget_is_read() -> None:
    backend = FakeBackend(script=THINKING.says("Yes."))
    async with talking(backend, THINKING) as connection:
        for name in ("thinking_budget", "thinking_token_budget"):
            assert (await connection.post(CHAT, {**HI, name: 7})).status == 200
        first, second = (stream.request for stream in backend.streams)
        assert first.constraints == second.constraints
        assert first.constraints is not None
        assert first.constraints.thinking_budget_tokens == 7
        both = await connection.post(CHAT, {**HI, "thinking_budget": 7, "thinking_token_budget": 7})
        assert (both.status, both.error["param"]) == (400, "thinking_token_budget")


@pytest.mark.parametrize("field", ["lora", "lora_path", "stop_regex", "structural_tag"])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_fields_of_other_servers_are_refused_by_name(connection: ClientConnection, field: str, path: str) -> None:
    body = {**HI, "max_tokens": 5} if path == "/v1/messages" else HI if path == CHAT else {"prompt": "a"}
    if path == "/v1/responses":
        body = {"input": "a"}
    refused = await connection.post(path, {**body, field: "x"})
    assert refused.status == 400
    assert refused.json()["error"]["message"].startswith(f"{field}: not supported")
    assert (await connection.post(path, {**body, field: None})).status == 200


async def test_completion_may_have_many_stop_strings(connection: ClientConnection, backend: FakeBackend) -> None:
    stops = [f"<{number}>" for number in range(15)]
    for path, body, field in (
        ("/v1/completions", {"prompt": "hi"}, "stop"),
        (CHAT, HI, "stop"),
        ("/v1/responses", {"input": "hi"}, "stop"),
        ("/v1/messages", {**HI, "max_tokens": 50}, "stop_sequences"),
    ):
        response = await connection.post(path, {**body, field: [*stops, "wor"]})
        assert response.status == 200
        assert b"Hello, " in response.body
        assert b"world" not in response.body
        assert (await connection.post(path, {**body, field: [*stops, "wor", "x"]})).status == 400


async def test_refusal_is_returned_as_the_assistants_text(connection: ClientConnection, backend: FakeBackend) -> None:
    parts = [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "Ask else."}]
    messages = [*HI["messages"], {"role": "assistant", "content": parts}, *HI["messages"]]
    assert (await connection.post(CHAT, {"messages": messages})).status == 200
    as_text = [*HI["messages"], {"role": "assistant", "content": "No.\nAsk else."}, *HI["messages"]]
    assert (await connection.post(CHAT, {"messages": as_text})).status == 200
    assert backend.streams[0].request.token_ids == backend.streams[1].request.token_ids
    messages[1] = {"role": "assistant", "content": [{"type": "refusal"}]}
    refused = await connection.post(CHAT, {"messages": messages})
    assert (refused.status, refused.error["param"]) == (400, "messages[1].content[0].refusal")


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {"reasoning_effort": "default"}, "reasoning_effort: must be one of high, low, max, medium, minimal, "),
        (CHAT, {"tool_choice": "any"}, 'tool_choice: must be one of auto, none, required, got "any"'),
        (
            CHAT,
            {"tool_choice": {"type": "auto"}},
            'tool_choice.type: must be one of allowed_tools, function, got "auto"',
        ),
        (
            CHAT,
            {"messages": [{"role": "function"}]},
            "messages[0].role: must be one of assistant, developer, system, tool, ",
        ),
        (
            CHAT,
            {"response_format": {"type": "xml"}},
            "response_format.type: must be one of json_object, json_schema, text, ",
        ),
        ("/v1/responses", {"input": "a", "reasoning": {"effort": "x"}}, "reasoning.effort: must be one of high, "),
        (
            "/v1/messages",
            {"max_tokens": 5, "thinking": {"type": "on"}},
            "thinking.type: must be one of adaptive, disabled, ",
        ),
        (
            "/v1/completions",
            {"prompt": "a", "truncation_side": "up"},
            "truncation_side: must be one of left, right, got ",
        ),
    ],
)
async def test_invalid_choice_is_answered_with_the_valid_ones(
    connection: ClientConnection, path: str, fields: dict[str, Any], expected: str
) -> None:
    refused = await connection.post(path, {**HI, **fields})
    assert refused.status == 400
    assert refused.json()["error"]["message"].startswith(expected)
