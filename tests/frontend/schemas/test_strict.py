"""Unknown fields: ignored, with a header and a log line; or refused under --strict."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.frontend.schemas.chat import ChatBody
from penstock.frontend.schemas.completion import CompletionBody
from penstock.frontend.schemas.messages import MessagesBody
from penstock.frontend.schemas.responses import ResponsesBody
from penstock.frontend.schemas.unknown_fields import find_unknown_fields
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


IGNORED = [
    *(case for case in UNKNOWN if case[2] != "messages[1].content[0].cache_control"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "x": 1}] * 20}, "messages[0].x"),
    (CHAT, {"a,b": 1, "é\x7f": 1, "猫": 1}, "a\\u002cb, \\xe9\\u007f, \\u732b"),
    (RESPONSES, {"max_output_token": 5, "verbosity": "low"}, "max_output_token, verbosity"),
    (MESSAGES, {"system": [{"type": "text", "text": "a", "cache_control": {"type": "x"}, "new": 1}]}, "system[0].new"),
]


@pytest.mark.parametrize(("path", "fields", "reported"), IGNORED, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True])
async def test_answer_names_the_fields_that_were_ignored(
    connection: ClientConnection, path: str, fields: dict[str, Any], reported: str, stream: bool
) -> None:
    response = await connection.post(path, {**BODIES[path], "stream": stream, **fields})
    assert response.status == 200
    assert response.headers["x-penstock-ignored"] == re.sub(r"\[\d\]", "[]", reported)


@pytest.mark.parametrize(("path", "fields"), KNOWN, ids=lambda value: str(value)[:40])
async def test_answer_to_known_fields_names_none(
    connection: ClientConnection, path: str, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    response = await connection.post(path, {**BODIES[path], **fields})
    assert "x-penstock-ignored" not in response.headers
    assert "ignored field" not in caplog.text


async def test_fields_that_change_no_answer_are_not_reported(connection: ClientConnection) -> None:
    history = [
        *HI,
        {"role": "assistant", "content": "a", "annotations": [{"x": 1}], "reasoning_details": [{"type": "x"}]},
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
    ]
    body = {"messages": history, "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    response = await connection.post(CHAT, body)
    assert response.status == 200
    assert "x-penstock-ignored" not in response.headers


async def test_error_names_ignored_fields_too(connection: ClientConnection) -> None:
    response = await connection.post(COMPLETIONS, {"prompt": "x", "max_token": 5, "model": "other"})
    assert (response.status, response.headers["x-penstock-ignored"]) == (404, "max_token")


async def test_each_field_is_logged_once_for_each_key_with_the_nearest_name(
    connect: Callable[..., ClientConnection], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.bodies")
    connection = connect(api_keys=["one", "two"])
    for key in ("one", "two", "one"):
        headers = [("authorization", f"Bearer {key}")]
        for body in ({"prompt": "x", "max_token": 5}, {"prompt": "x", "max_token": 5, "zzz": 1}):
            assert (await connection.request("POST", COMPLETIONS, body, headers)).status == 200
    assert [record.getMessage() for record in caplog.records if record.name == "penstock.bodies"] == [
        "ignored field max_token, sent by key key-1: unknown, did you mean max_tokens?",
        "ignored field zzz, sent by key key-1: unknown",
        "ignored field max_token, sent by key key-2: unknown, did you mean max_tokens?",
        "ignored field zzz, sent by key key-2: unknown",
    ]


async def test_header_and_log_of_each_key_are_bounded(
    connect: Callable[..., ClientConnection], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.bodies")
    connection = connect(api_keys=["one", "two"])
    flood, other = ([("authorization", f"Bearer {key}")] for key in ("one", "two"))
    for start in range(0, 160, 16):
        many = {f"{number}_{'é' * 500}": 1 for number in range(start, start + 16)}
        response = await connection.request("POST", COMPLETIONS, {"prompt": "x", **many}, flood)
        assert len(response.headers["x-penstock-ignored"]) < 1100
        assert response.headers["x-penstock-ignored"].endswith(", ...")
    lines = [record.getMessage() for record in caplog.records if record.name == "penstock.bodies"]
    assert len(lines) == 101
    assert max(map(len, lines)) < 200
    await connection.request("POST", COMPLETIONS, {"prompt": "x", "zzz": 1}, other)
    assert caplog.records[-1].getMessage() == "ignored field zzz, sent by key key-2: unknown"


async def test_strict_error_suggests_the_nearest_name(connect: Callable[..., ClientConnection]) -> None:
    response = await connect(refuses_unknown_fields=True).post(COMPLETIONS, {"prompt": "x", "stop_token_id": [1]})
    assert response.error["message"].startswith("stop_token_id: unknown field, did you mean stop_token_ids?")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"prompt":5,"new":1}', b"[" * 100_000, b'{"prompt":"\xff"}'])
async def test_other_errors_are_reported_as_without_strict(
    connect: Callable[..., ClientConnection], connection: ClientConnection, body: bytes
) -> None:
    strict = await connect(refuses_unknown_fields=True).post(COMPLETIONS, body)
    assert (strict.status, strict.body) == (400, (await connection.post(COMPLETIONS, body)).body)


@pytest.mark.parametrize("struct", [ChatBody, CompletionBody, MessagesBody, ResponsesBody])
async def test_every_declared_field_is_known(struct: type[msgspec.Struct]) -> None:
    body = {field.name: 1 for field in msgspec.structs.fields(struct)}
    assert await find_unknown_fields(msgspec.json.encode(body), struct) == []


async def test_loop_gets_turns_while_a_large_body_is_searched() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 2000}] * 10}
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count_turns())
    assert await find_unknown_fields(msgspec.json.encode(body), ChatBody) == []
    counter.cancel()
    assert turns > 20


async def test_names_are_compared_once_and_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing takes almost 1 ms; a body may have 65,536 names, and its client chooses them."""
    compared: list[str] = []

    def compare(name: str, *_args: object) -> list[str]:
        compared.append(name)
        return []

    monkeypatch.setattr("difflib.get_close_matches", compare)
    repeated = {"messages": [{"role": "user", "content": "x", "contnt": 1}] * 100}
    assert len(await find_unknown_fields(msgspec.json.encode(repeated), ChatBody)) == 1
    assert compared == ["contnt"]
    dotted = {"messages": HI} | {f"{number}.temperatur": 1 for number in range(100)}
    assert len(await find_unknown_fields(msgspec.json.encode(dotted), ChatBody)) == 16
    assert compared[1:] == [f"{number}.temperatur" for number in range(16)]
