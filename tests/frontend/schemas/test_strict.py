"""Unknown fields: ignored with a debug line, or refused under --strict."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.frontend.schemas.chat import ChatBody
from penstock.frontend.schemas.completion import CompletionBody
from penstock.frontend.schemas.messages import MessagesBody
from penstock.frontend.schemas.responses import ResponsesBody
from penstock.frontend.schemas.unknown_fields import check_unknown_fields
from tests.frontend.harness import ClientConnection, FakeBackend

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETIONS: {"prompt": "x"},
    MESSAGES: {"messages": HI, "max_tokens": 5, "model": "test/model"},
    RESPONSES: {"input": "x"},
}

# endpoint, fields, the reported path
UNKNOWN: list[tuple[str, dict[str, Any], str]] = [
    *((path, {"something_new": 1}, "something_new") for path in BODIES),
    (CHAT, {"messages": [{"role": "user", "content": "hi", "weight": 1}]}, "messages[0].weight"),
    (
        CHAT,
        {
            "messages": [
                *HI,
                {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]},
            ]
        },
        "messages[1].content[0].cache_control",
    ),
    (CHAT, {"stream": True, "stream_options": {"include_usage": True, "chunks": 5}}, "stream_options.chunks"),
    (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "lax": 1}}},
        "response_format.json_schema.lax",
    ),
    (COMPLETIONS, {"structured_outputs": {"backend": "x"}}, "structured_outputs.backend"),
    (COMPLETIONS, {"x\n\x1b[31m": 1}, "x\\n\\u001b[31m"),
]
KNOWN: list[tuple[str, dict[str, Any]]] = [
    *((path, {}) for path in BODIES),
    *((path, {"something_new": nothing}) for path in (CHAT, COMPLETIONS) for nothing in (None, False, [], {}, "")),
    (CHAT, {"metadata": {"anything": "x"}, "chat_template_kwargs": {"anything": [{"else": 1}]}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object", "new": 1}}}}),
    (CHAT, {"tool_choice": "none", "tools": [{"function": {"name": "f", "parameters": {"x-new": 1}}}]}),
    (
        CHAT,
        {"messages": [*HI, {"role": "assistant", "content": "a", "refusal": None, "annotations": [], "audio": None}]},
    ),
]


@pytest.mark.parametrize(("path", "fields", "reported"), UNKNOWN, ids=lambda value: str(value)[:40])
async def test_strict_refuses_an_unknown_field_by_name(
    connect: Callable[..., ClientConnection], backend: FakeBackend, path: str, fields: dict[str, Any], reported: str
) -> None:
    connection = connect(refuses_unknown_fields=True)
    response = await connection.post(path, {**BODIES[path], **fields})
    assert response.status == 400
    message = response.json()["error"]["message"]
    assert message.startswith(f"{reported}: ")
    assert "--strict" in message
    if path in (CHAT, COMPLETIONS):
        assert (response.error["param"], response.error["code"]) == (reported, "unsupported_parameter")
    assert backend.streams == []


@pytest.mark.parametrize(("path", "fields"), KNOWN, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("strict", [False, True])
async def test_strict_accepts_known_fields_and_values_that_ask_for_nothing(
    connect: Callable[..., ClientConnection], path: str, fields: dict[str, Any], strict: bool
) -> None:
    connection = connect(refuses_unknown_fields=strict)
    assert (await connection.post(path, {**BODIES[path], **fields})).status == 200


@pytest.mark.parametrize(("path", "fields", "reported"), UNKNOWN, ids=lambda value: str(value)[:40])
async def test_without_strict_a_debug_line_names_unknown_fields(
    connection: ClientConnection, path: str, fields: dict[str, Any], reported: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert (await connection.post(path, {**BODIES[path], **fields})).status == 200
    assert "ignored" not in caplog.text
    with caplog.at_level(logging.DEBUG, "penstock.bodies"):
        assert (await connection.post(path, {**BODIES[path], **fields})).status == 200
    (line,) = [record.getMessage() for record in caplog.records if record.name == "penstock.bodies"]
    assert line.endswith(f"has unknown fields, which are ignored: {reported}")


async def test_debug_line_lists_only_a_few_fields(
    connection: ClientConnection, caplog: pytest.LogCaptureFixture
) -> None:
    many = {f"field_{number}_{'x' * 500}": 1 for number in range(1000)}
    with caplog.at_level(logging.DEBUG, "penstock.bodies"):
        assert (await connection.post(COMPLETIONS, {"prompt": "x", **many})).status == 200
    (line,) = [record.getMessage() for record in caplog.records if record.name == "penstock.bodies"]
    assert len(line) < 2000


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"prompt":5,"new":1}', b"[" * 100_000, b'{"prompt":"\xff"}'])
async def test_other_errors_are_reported_as_without_strict(
    connect: Callable[..., ClientConnection], connection: ClientConnection, body: bytes
) -> None:
    strict = await connect(refuses_unknown_fields=True).post(COMPLETIONS, body)
    assert (strict.status, strict.body) == (400, (await connection.post(COMPLETIONS, body)).body)


@pytest.mark.parametrize("struct", [ChatBody, CompletionBody, MessagesBody, ResponsesBody])
def test_every_declared_field_is_known(struct: type[msgspec.Struct]) -> None:
    fields = [field.name for field in msgspec.structs.fields(struct)]
    needed = {"messages": HI, "prompt": "x", "input": "x", "max_tokens": 5, "model": "m"}
    body = {name: needed.get(name) for name in fields}
    check_unknown_fields(msgspec.json.encode(body), struct, "id", refuses=True)
