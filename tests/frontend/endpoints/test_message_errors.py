"""Errors of Anthropic's Messages API."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.frontend.transport.errors import ApiError, ErrorKind, anthropic_error
from penstock.shm.client import BackendUnavailable, Overloaded, TokenBatch
from penstock.shm.messages import FailureCode, Finish
from tests.frontend.endpoints.test_messages import HI, KEYS, PATH, TIME, error
from tests.frontend.harness import ClientConnection, FakeBackend, silent, token_ids
from tests.frontend.named_events import named_events

API_DOC = (Path(__file__).parents[3] / "docs" / "api" / "messages.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_key_is_read_from_either_header(connect: Callable[..., ClientConnection], header: str) -> None:
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
async def test_every_error_has_anthropics_format(
    connect: Callable[..., ClientConnection], method: str, path: str, body: Any, status: int, kind: str
) -> None:
    refused = await connect(max_body_bytes=2000).request(method, path, body)
    assert (refused.status, error(refused)["type"]) == (status, kind)


@pytest.mark.parametrize("kind", ErrorKind)
def test_every_error_has_one_of_anthropics_types(kind: ErrorKind) -> None:
    status, body = anthropic_error(ApiError(kind, "why"), "r1")
    assert status == (529 if kind is ErrorKind.OVERLOADED else kind.status)
    answer = json.loads(body)
    assert (answer["type"], answer["request_id"], answer["error"]["message"]) == ("error", "r1", "why")
    if status != 413:  # missing in the SDK's types, but in Anthropic's documentation
        from anthropic.types import ErrorResponse  # takes seconds

        ErrorResponse.model_validate(answer)
    rows = re.findall(r"^\| ([\d, ]+) \| `(\w+)`", API_DOC, flags=re.MULTILINE)
    assert next(name for statuses, name in rows if str(status) in statuses.split(", ")) == answer["error"]["type"]


async def test_backend_errors_have_anthropics_format(connection: ClientConnection, backend: FakeBackend) -> None:
    backend.refusal = Overloaded(7, 1024)
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


async def test_failure_in_a_stream_is_its_last_event(connection: ClientConnection, backend: FakeBackend) -> None:
    failure = TokenBatch([], Finish.FAILED, FailureCode.OVERLOADED)
    backend.script = lambda _: [TokenBatch(token_ids("a")), failure]
    response = await connection.post(PATH, {**HI, "stream": True})
    last = named_events(response)[-1]
    assert set(last) == KEYS
    assert last["error"]["type"] == "overloaded_error"
    assert last["request_id"] == response.headers["request-id"]


async def test_hang_up_cancels_the_message(connection: ClientConnection, backend: FakeBackend) -> None:
    backend.script = silent
    data = json.dumps({**HI, "stream": True}).encode()
    connection.send(b"POST /v1/messages HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))
    await backend.submitted.wait()
    connection.transport.reset()
    await asyncio.wait_for(backend.streams[0].cancelled.wait(), 60)


def message(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {**HI, "messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("body", "param", "shown"),
    [
        ({"messages": HI["messages"]}, "max_tokens", "required"),
        ({"max_tokens": 5}, "messages", "required"),
        ({**HI, "messages": []}, "messages", "length"),
        ({**HI, "messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "tool"),
        ({**HI, "messages": [{"role": "user", "content": []}]}, "messages", "at least one needs content"),
        (message({"type": "image", "source": {}}), "messages[0].content[0].source.type", "required"),
        (message({"type": "document", "source": {}}), "messages[0].content[0].type", "document"),
        (message({"type": "text"}), "messages[0].content[0].text", "required"),
        (message({"type": "tool_use", "id": "x", "name": "f", "input": {}}), "messages[0].content[0].type", "tool_use"),
        (
            message({"type": "tool_use", "id": "x", "name": "f"}, role="assistant"),
            "messages[0].content[0].input",
            "required",
        ),
        (message({"type": "tool_result"}), "messages[0].content[0].tool_use_id", "required"),
        (
            message({"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}),
            "messages[0].content[0].content[0].source",
            "required",
        ),
        ({**HI, "system": [{"type": "image"}]}, "system[0].type", "image"),
        ({**HI, "max_tokens": 0}, "max_tokens", "0"),
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
async def test_invalid_field_is_named(
    connection: ClientConnection, body: dict[str, Any], param: str, shown: str
) -> None:
    response = await connection.post(PATH, body)
    assert response.status == 400
    found = error(response)
    assert found["type"] == "invalid_request_error"
    assert found["message"].startswith(f"{param}: "), found["message"]
    assert shown in found["message"]
