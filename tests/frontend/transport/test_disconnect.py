"""A client that hangs up or stops reading, at every stage: its streams are cancelled and nothing stays open."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.shm.messages import Finish
from tests.frontend.harness import ClientConnection, FakeBackend, request_bytes, silent, token_ids

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}]}


async def all_cancelled(backend: FakeBackend) -> None:
    async with asyncio.timeout(60):
        for stream in backend.streams:
            await stream.cancelled.wait()


@pytest.mark.parametrize("body", [b"", b'{"messages"', b"{" * 1000])
async def test_hang_up_before_the_body_is_complete_submits_nothing(
    connection: ClientConnection, backend: FakeBackend, body: bytes
) -> None:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n"
    )
    connection.send(head + b"\r\n" + body)
    await asyncio.sleep(0)
    connection.transport.reset()
    await connection.idle()
    assert not backend.streams
    assert not connection.transport.output


async def test_hang_up_within_the_headers_closes_the_connection(connection: ClientConnection) -> None:
    connection.send(b"POST /v1/chat/completions HTTP/1.1\r\nho")
    connection.transport.reset()
    await connection.idle()
    assert not connection.transport.output
    assert not connection.state.connections


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_hang_up_before_the_first_token_cancels_the_streams(
    connection: ClientConnection, backend: FakeBackend, stream: bool, num_choices: int
) -> None:
    backend.script = silent
    connection.send(request_bytes("POST", CHAT, {**BODY, "stream": stream, "n": num_choices}))
    await backend.submitted.wait()
    await asyncio.sleep(0)
    connection.transport.reset()
    await all_cancelled(backend)
    await connection.idle()
    assert len(backend.streams) == num_choices


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_hang_up_within_the_answer_cancels_the_streams(
    connection: ClientConnection, backend: FakeBackend, stream: bool, num_choices: int
) -> None:
    backend.script = silent
    connection.send(request_bytes("POST", CHAT, {**BODY, "stream": stream, "n": num_choices}))
    await backend.submitted.wait()
    backend.streams[0].push(*token_ids("the"))
    if stream:
        await connection.output(b'"content":"the"')
    else:
        await asyncio.sleep(0)
    connection.transport.reset()
    await all_cancelled(backend)
    await connection.idle()


async def test_hang_up_after_keep_alive_comments_cancels_the_streams(
    connect: Callable[..., ClientConnection], backend: FakeBackend
) -> None:
    backend.script = silent
    connection = connect(keep_alive_interval_s=0.0)
    app = connection.protocol.app
    connection.send(request_bytes("POST", CHAT, {**BODY, "stream": True}))
    await backend.submitted.wait()
    await asyncio.sleep(0)
    app.exchanges.sweep(time.monotonic())
    await connection.output(b": keep-alive\n\n")
    assert connection.transport.output.startswith(b"HTTP/1.1 200 OK")
    connection.transport.reset()
    await all_cancelled(backend)
    await connection.idle()
    assert len(app.exchanges) == 0


async def test_comment_that_was_due_as_its_stream_ended_is_not_sent(
    connect: Callable[..., ClientConnection], backend: FakeBackend
) -> None:
    backend.script = silent
    connection = connect(keep_alive_interval_s=0.0)
    connection.send(request_bytes("POST", CHAT, {**BODY, "stream": True}))
    await backend.submitted.wait()
    await asyncio.sleep(0)
    (exchange,) = connection.protocol.app.exchanges._open
    comment = exchange.idle_action()
    backend.streams[0].push(*token_ids("the"), finish=Finish.LENGTH)
    assert (await connection.response()).status == 200
    await comment
    assert b": keep-alive" not in connection.transport.output


LONG = "the cat " * 10_000
PREPARING: list[tuple[str, dict[str, Any]]] = [
    (CHAT, BODY),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/messages", {**BODY, "max_tokens": 1}),
    ("/v1/messages/count_tokens", BODY),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/responses", {"input": "hi", "truncation": "auto"}),
    ("/v1/responses/input_tokens", {"input": "hi"}),
    ("/tokenize", {"prompt": "hi"}),
]


@pytest.mark.parametrize(("path", "body"), PREPARING)
@pytest.mark.parametrize("shuts_down", [False, True])
async def test_hang_up_or_shutdown_while_tokenizing_submits_nothing(
    connection: ClientConnection,
    backend: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    shuts_down: bool,
) -> None:
    encoding = asyncio.Event()

    async def endless_encode(_self: object, texts: list[str], **options: object) -> list[list[int]]:
        encoding.set()
        await asyncio.Event().wait()
        raise AssertionError((texts, options))

    monkeypatch.setattr("penstock.frontend.text.tokenizer.ModelTokenizer.encode", endless_encode)
    connection.send(request_bytes("POST", path, body))
    await encoding.wait()
    if shuts_down:
        connection.protocol.app.exchanges.end_all()
        assert (await connection.response()).status == 503
    else:
        connection.transport.reset()
    await connection.idle()
    assert not backend.streams
    assert len(connection.protocol.app.exchanges) == 0


async def test_hang_up_while_waiting_for_a_thread_renders_nothing(
    connection: ClientConnection, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[object] = []
    monkeypatch.setattr(
        "penstock.frontend.text.chat_template.ChatTemplate.render", lambda _self, body: rendered.append(body)
    )
    queued = asyncio.Event()

    class WatchedExecutor(ThreadPoolExecutor):
        def submit(self, *call: Any, **fields: Any) -> Any:
            queued.set()
            return super().submit(*call, **fields)

    with WatchedExecutor(1) as executor:
        asyncio.get_running_loop().set_default_executor(executor)
        is_free = threading.Event()
        blocker = executor.submit(is_free.wait)
        queued.clear()
        connection.send(request_bytes("POST", CHAT, {"messages": [{"role": "user", "content": LONG}]}))
        await queued.wait()
        connection.transport.reset()
        await connection.idle()
        is_free.set()
        assert blocker.result()
    assert not rendered
    assert not backend.streams


async def test_hang_up_does_not_stop_a_background_response(
    connection: ClientConnection, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding, encoded = asyncio.Event(), asyncio.Event()

    async def slow_encode(_self: object, texts: list[str], **_options: object) -> list[list[int]]:
        encoding.set()
        await encoded.wait()
        return [token_ids(text) for text in texts]

    monkeypatch.setattr("penstock.frontend.text.tokenizer.ModelTokenizer.encode", slow_encode)
    connection.send(request_bytes("POST", "/v1/responses", {"input": "hi", "background": True}))
    await encoding.wait()
    connection.transport.reset()
    await asyncio.sleep(0)
    encoded.set()
    await connection.idle()
    assert len(backend.streams) == 1


async def test_hang_up_behind_a_pipelined_request_is_noticed(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    backend.script = silent
    connection.send(request_bytes("POST", CHAT, BODY) + request_bytes("POST", CHAT, BODY))
    await backend.submitted.wait()
    connection.send(b"x" * 100_000)
    connection.transport.reset()
    await all_cancelled(backend)
    await connection.idle()
    assert len(backend.streams) == 1


async def test_hang_up_after_the_answer_cancels_nothing(connection: ClientConnection, backend: FakeBackend) -> None:
    await connection.post(CHAT, BODY)
    connection.transport.reset()
    await connection.idle()
    assert not backend.streams[0].cancelled.is_set()


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_does_not_read_is_dropped(
    connect: Callable[..., ClientConnection], backend: FakeBackend, stream: bool
) -> None:
    connection = connect(client_timeout_s=30.0)
    app = connection.protocol.app
    backend.script = silent
    connection.send(request_bytes("POST", CHAT, {**BODY, "stream": stream}))
    await backend.submitted.wait()
    connection.transport.block()
    fed = backend.streams[0]
    fed.push(*token_ids("the cat"), finish=Finish.NONE if stream else Finish.LENGTH)
    for _ in range(5):
        await asyncio.sleep(0)
    app.exchanges.sweep(time.monotonic() + 29)
    assert not connection.transport.aborted
    app.exchanges.sweep(time.monotonic() + 31)
    assert connection.transport.aborted
    await connection.idle()
    assert fed.cancelled.is_set() or fed.ended
    assert len(app.exchanges) == 0


async def test_body_that_never_arrives_is_a_408(
    connection: ClientConnection, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.frontend.endpoints.context._BODY_TIMEOUT_S", 0.01)
    monkeypatch.setattr("penstock.frontend.transport.exchange._DISCARD_TIMEOUT_S", 0.01)
    connection.send(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 50\r\n\r\n{")
    response = await connection.response()
    assert (response.status, response.error["code"]) == (408, "request_timeout")
    assert not backend.streams


@pytest.mark.parametrize("stage", ["whole", "stream not started", "stream started"])
async def test_requests_ended_by_the_drain_get_an_error(
    connection: ClientConnection, backend: FakeBackend, stage: str
) -> None:
    backend.script = silent
    connection.send(request_bytes("POST", CHAT, {**BODY, "stream": stage != "whole"}))
    await backend.submitted.wait()
    if stage == "stream started":
        backend.streams[0].push(*token_ids("the"))
        await connection.output(b'"content":"the"')
    connection.protocol.app.exchanges.end_all()
    response = await connection.response()
    if stage == "stream started":
        error: dict[str, Any] = response.events()[-1]["error"]
        assert response.status == 200
    else:
        error = response.error
        assert response.status == 503
    assert error["code"] == "shutting_down"
    assert backend.streams[0].cancelled.is_set()
