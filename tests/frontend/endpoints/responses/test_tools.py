"""Tools of the Responses API that are no plain functions: custom ones, namespaces, and hosted ones."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from tests.frontend.harness import ClientConnection, FakeBackend, make_app, model_keeper
from tests.frontend.model_families import MODELS

URL = "/v1/responses"
# openresponses/openresponses, schema/components/schemas/ResponseResource.json
REQUIRED = {
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id",
    "instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p",
    "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage",
    "max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier",
    "prompt_cache_key",
}  # fmt: skip
HERMES = MODELS["hermes"]
# As Codex CLI sends them, codex-rs/tools/src/tool_spec.rs
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF\nLF: "\\n"'},
}
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
SERVER = {
    "type": "namespace",
    "name": "mcp__files__",
    "description": "Tools in the mcp__files__ namespace.",
    "tools": [{**SHELL, "name": "read"}],
}
SEARCH = {"type": "web_search", "external_web_access": False, "search_context_size": "low"}
CODEX = {"input": "hi", "tools": [SHELL, PATCH, SERVER, SEARCH], "tool_choice": "auto", "store": False}


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def connection(backend: FakeBackend) -> AsyncIterator[ClientConnection]:
    """A model that writes calls as hermes does."""
    served = HERMES.served(backend)
    connection = ClientConnection(make_app(backend, keeper=model_keeper(backend, served)))
    yield connection
    await connection.end()


def calls(backend: FakeBackend, name: str, **arguments: Any) -> None:
    text = json.dumps({"name": name, "arguments": arguments})
    backend.script = HERMES.says(f"<tool_call>\n{text}\n</tool_call>")


async def output(connection: ClientConnection, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await connection.post(URL, body)
    assert answer.status == 200, answer.body
    items: list[dict[str, Any]] = answer.json()["output"]
    return items


async def test_custom_tool_is_called_with_a_text(connection: ClientConnection, backend: FakeBackend) -> None:
    patch = '*** Begin Patch\n"é"\n'
    calls(backend, "apply_patch", input=patch)
    (item,) = await output(connection, CODEX)
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", patch)
    assert item["call_id"].startswith("call_")
    assert "arguments" not in item


async def test_streamed_custom_call_is_what_openais_sdk_reads(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    calls(backend, "apply_patch", input="a\nb")
    response = await connection.post(URL, {**CODEX, "stream": True})
    blocks = response.body.decode().strip().split("\n\n")
    assert blocks.pop() == "data: [DONE]"
    events = [json.loads(block.partition("\ndata: ")[2]) for block in blocks]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    by_type = {event["type"]: event for event in events}
    assert by_type["response.custom_tool_call_input.delta"]["delta"] == "a\nb"
    assert by_type["response.custom_tool_call_input.done"]["input"] == "a\nb"
    assert by_type["response.output_item.added"]["item"]["type"] == "custom_tool_call"
    final = openai.types.responses.Response.model_validate(by_type["response.completed"]["response"])
    assert [item.type for item in final.output] == ["custom_tool_call"]


async def test_function_in_a_namespace_is_called_by_both_names(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    calls(backend, "mcp__files__read", command="x")
    (item,) = await output(connection, CODEX)
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "mcp__files__", "read")
    assert json.loads(item["arguments"]) == {"command": "x"}


async def test_history_shows_the_model_its_calls_as_it_made_them(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    history = [
        {"role": "user", "content": "hi"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": 'say "x"'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "patched"},
        {"type": "function_call", "call_id": "c2", "namespace": "mcp__files__", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "contents"},
    ]
    await output(connection, {**CODEX, "input": history})
    prompt = HERMES.tokenizer.decode(list(backend.last.token_ids), skip_special_tokens=False)
    assert '{"input":"say \\\\"x\\\\""}' in prompt.replace(": ", ":") or '"input": "say \\"x\\""' in prompt
    for text in ("apply_patch", "patched", "mcp__files__read", "contents", "Begin Patch"):
        assert text in prompt
    assert "web_search" not in prompt


async def test_hosted_tools_are_left_out_and_reported(
    connection: ClientConnection, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    answer = await connection.post(URL, CODEX)
    assert answer.status == 200
    assert answer.headers["x-penstock-ignored"] == "tools[].search_context_size, tools[3]"
    assert "ignored tool of type web_search, sent by a client: this server does not carry it out" in caplog.text
    assert [tool["type"] for tool in answer.json()["tools"]] == ["function", "custom", "namespace", "web_search"]


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"tools": [SEARCH], "tool_choice": "required"}, "tool_choice", "this server carries out none of these tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", 'must be "function", "custom"'),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type", "only function and custom tools"),
        ({"tools": [{"type": "namespace", "name": "x"}]}, "tools[0].tools", "required"),
        ({"tools": [{**SERVER, "tools": [SERVER]}]}, "tools[0].tools[0].type", "only function and custom tools"),
        ({"tools": [PATCH, PATCH]}, "tools[1].name", "is the name of tools[0] too"),
        ({"tools": [{**PATCH, "format": {"type": "grammar"}}]}, "tools[0].format.syntax", "required"),
        ({"tools": [{**SERVER, "tools": [{**SHELL, "name": f"f{n}"} for n in range(128)]}, SHELL]}, "tools", "129"),
    ],
)
async def test_tools_that_cannot_be_served_are_refused(
    connection: ClientConnection, fields: dict[str, Any], param: str, reason: str
) -> None:
    refused = await connection.post(URL, {"input": "x", **fields})
    assert (refused.status, refused.error["param"]) == (400, param)
    assert reason in refused.error["message"]


async def test_input_of_a_regular_custom_tool_is_forced(connection: ClientConnection, backend: FakeBackend) -> None:
    digits = {
        "type": "custom",
        "name": "dial",
        "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"},
    }
    choice = {"type": "custom", "name": "dial"}
    calls(backend, "dial", input="110")
    await output(connection, {"input": "x", "tools": [digits], "tool_choice": choice})
    constraints = backend.last.constraints
    assert constraints is not None
    assert constraints.grammar is not None
    assert "^(?:[0-9]+)$" in constraints.grammar.text


async def test_forced_call_wins_over_a_text_format(connection: ClientConnection, backend: FakeBackend) -> None:
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    calls(backend, "shell", command="ls")
    for choice in ("required", {"type": "function", "name": "shell"}):
        body = {"input": "x", "tools": [SHELL], "tool_choice": choice, "text": {"format": schema}}
        (item,) = await output(connection, body)
        assert (item["type"], item["name"]) == ("function_call", "shell")


async def test_response_has_the_fields_that_open_responses_requires(connection: ClientConnection) -> None:
    bare = {"type": "function", "name": "f"}
    several = {"type": "namespace", "name": "n", "tools": [bare]}
    answer = (await connection.post(URL, {"input": "x", "tools": [bare, several], "presence_penalty": 0.5})).json()
    assert answer.keys() >= REQUIRED
    assert (answer["presence_penalty"], answer["frequency_penalty"]) == (0.5, 0.0)
    whole = {**bare, "description": None, "parameters": None, "strict": None}
    assert answer["tools"] == [whole, {**several, "tools": [whole]}]
