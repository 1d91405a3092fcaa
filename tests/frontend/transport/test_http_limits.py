"""The protocol's own limits: raw bytes that are too many, too slow, or can be read in two ways."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from penstock.frontend.transport.serving import http_limits
from penstock.frontend.transport.serving.connections import MIN_IDLE_S, Connections
from penstock.frontend.transport.serving.http_limits import HEAD_TIMEOUT_S, MAX_HEAD_BYTES, MAX_HEADER_LINES
from penstock.frontend.transport.serving.server import server_config
from penstock.shm.messages import Finish
from tests.frontend.harness import ClientConnection, FakeBackend, make_app, request_bytes, silent, token_ids

GET = b"GET /health HTTP/1.1\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"

BAD_REQUESTS: list[bytes] = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,  # a TLS hello
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"hello\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /health\r\n\r\n",
    b"GET /health HTTP/9.9\r\nhost: a\r\n\r\n",
    b"GET /health HTTP/0.9\r\nhost: a\r\n\r\n",
    b"GET /health HTTP/2.0\r\nhost: a\r\n\r\n",
    b"GET /health HTTQ/1.1\r\nhost: a\r\n\r\n",
    b"GET health HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /he alth HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /\x00 HTTP/1.1\r\nhost: a\r\n\r\n",
    b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n",
    b"G@T /health HTTP/1.1\r\nhost: a\r\n\r\n",
    GET + b"\r\n",  # no Host
    GET + b"host: a\r\nhost: b\r\n\r\n",
    GET + b"host: a\r\nHost: a\r\n\r\n",
    GET + b"host: a/?x=\r\n\r\n",
    GET + b"host: a, b\r\n\r\n",
    GET + b"host: a b\r\n\r\n",
    GET + b"host: user@a\r\n\r\n",
    GET + b"host: a\r\nx y: z\r\n\r\n",
    GET + b"host: a\r\nx : z\r\n\r\n",
    GET + b"host: a\r\n: z\r\n\r\n",
    GET + b"host: a\r\nno colon\r\n\r\n",
    GET + b"host: a\r\nx: a\x00b\r\n\r\n",
    GET + b"host: a\r\nx: a\rb\r\n\r\n",
    GET + b"host: a\r\nx: 1\r\n folded\r\n\r\n",
    POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\nxxxxx",
    POST + b"content-length: 5\r\ncontent-length: 5\r\n\r\nxxxxx",
    POST + b"content-length: 5, 5\r\n\r\nxxxxx",
    POST + b"content-length: -5\r\n\r\n",
    POST + b"content-length: +5\r\n\r\nxxxxx",
    POST + b"content-length: 0x5\r\n\r\nxxxxx",
    POST + b"content-length: 5.0\r\n\r\nxxxxx",
    POST + b"content-length: 99999999999999999999999\r\n\r\n",
    POST + b"content-length: five\r\n\r\n",
    POST + b"content-length:\r\n\r\n",
    POST + b"transfer-encoding: gzip\r\n\r\n",
    POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    POST + b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"transfer-encoding: identity\r\n\r\n",
    POST + b"transfer-encoding: xchunked\r\n\r\n",
    POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    POST + b"transfer-encoding: chunked\r\n\r\n-1\r\n",
    POST + b"transfer-encoding: chunked\r\n\r\n0x5\r\nxxxxx\r\n",
    POST + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    POST + b"transfer-encoding: chunked\r\n\r\n1\r\nxx\r\n",
    POST.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
]


@pytest.mark.parametrize("data", BAD_REQUESTS, ids=lambda data: repr(data[-60:]))
async def test_bytes_that_are_not_http_are_400_and_close_the_connection(
    connection: ClientConnection, data: bytes
) -> None:
    connection.send(data)
    response = await connection.response()
    assert (response.status, response.error["code"]) == (400, "bad_http")
    await connection.closed()
    await connection.idle()
    assert connection.transport.output.count(b"content-length: ") == 1


PLAIN_POST = b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b"


async def test_stream_over_http_1_0_has_no_chunks_and_ends_with_the_connection(connection: ClientConnection) -> None:
    body = b'{"prompt":"x","stream":true}'
    connection.send(PLAIN_POST % (len(body), body))
    await connection.closed()
    head, _, events = bytes(connection.transport.output).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nconnection: close" in head
    assert b"transfer-encoding" not in head
    assert b"content-length" not in head
    *blocks, end = events.split(b"\n\n")
    assert blocks[-1] == b"data: [DONE]"
    assert all(block.startswith(b"data: ") for block in blocks)
    assert not end
    whole = "".join(json.loads(block[6:])["choices"][0]["text"] for block in blocks[:-1])
    assert whole == "Hello, world!"


async def test_parts_for_a_slow_http_1_0_client_do_not_mix(connection: ClientConnection, backend: FakeBackend) -> None:
    backend.script = silent
    body = b'{"prompt":"x","stream":true}'
    connection.send(PLAIN_POST % (len(body), body))
    await backend.submitted.wait()
    backend.streams[0].push(*token_ids("the"))
    await connection.output(b'"text":"the"')
    app = connection.protocol.app
    connection.transport.block()
    app.exchanges.sweep(time.monotonic() + 11)  # a comment
    for _ in range(5):
        await asyncio.sleep(0)
    backend.streams[0].push(*token_ids(" cat"), finish=Finish.LENGTH)
    for _ in range(5):
        await asyncio.sleep(0)
    connection.protocol.resume_writing()
    await connection.closed()
    output = bytes(connection.transport.output)
    assert output.endswith(b"data: [DONE]\n\n")
    assert output.count(b": keep-alive\n\n") == 1
    assert b'"text":" cat"' in output


@pytest.mark.parametrize("body", [b'{"prompt":"x"}', b"{"])
async def test_answer_with_a_length_keeps_it_over_http_1_0(connection: ClientConnection, body: bytes) -> None:
    connection.send(PLAIN_POST % (len(body), body))
    response = await connection.response()
    assert int(response.headers["content-length"]) == len(response.body) > 0
    await connection.closed()


async def test_http_1_0_is_served_and_closed(connection: ClientConnection) -> None:
    connection.send(b"GET /health HTTP/1.0\r\n\r\n")
    assert (await connection.response()).status == 200
    await connection.closed()


@pytest.mark.parametrize("host", [b"localhost:8000", b"[::1]:8000", b"a.example", b"a_b-c.example:1", b""])
async def test_host_header_must_be_a_host_and_a_port(connection: ClientConnection, host: bytes) -> None:
    connection.send(GET + b"host: " + host + b"\r\n\r\n")
    assert (await connection.response()).status == 200


@pytest.mark.parametrize("size", [1, 7, 1000, 1 << 20])
async def test_endless_headers_are_cut_at_the_limit(connection: ClientConnection, size: int) -> None:
    data = GET + b"host: a\r\nx: " + b"y" * (1 << 20)
    num_sent = 0
    while num_sent < len(data) and not connection.transport.closed:
        connection.send(data[num_sent : num_sent + size])
        num_sent += size
    assert num_sent < MAX_HEAD_BYTES + 1 + size
    assert (await connection.response()).status == 431


@pytest.mark.parametrize(
    "filler", [b"GET /", b"GET /health HTTP/1.1\r\n", b"\r\n" * 20_000, GET + b"host: a\r\n" + b"a" * 40_000]
)
async def test_every_part_of_the_head_is_limited(connection: ClientConnection, filler: bytes) -> None:
    connection.send(filler + b"y" * 40_000)
    assert (await connection.response()).status in (400, 431)
    await connection.closed()


@pytest.mark.parametrize("spare", [0, 1])
async def test_limit_of_the_head_is_exact(connection: ClientConnection, spare: int) -> None:
    head = GET + b"host: a\r\nx: %s\r\n\r\n"
    data = head % (b"y" * (MAX_HEAD_BYTES - len(head) + 2 + spare))
    assert len(data) == MAX_HEAD_BYTES + spare
    connection.send(data)
    assert (await connection.response()).status == (200 if spare == 0 else 431)


@pytest.mark.parametrize("excess", [0, 1])
async def test_limit_of_header_lines_is_exact(connection: ClientConnection, excess: int) -> None:
    connection.send(GET + b"host: a\r\n" + b"x: y\r\n" * (MAX_HEADER_LINES - 1 + excess) + b"\r\n")
    assert (await connection.response()).status == (431 if excess else 200)


@pytest.mark.parametrize("tail", [b"1;" + b"x" * 100_000, b"0\r\nx: " + b"y" * 100_000, b"0\r\n" + b"x: y\r\n" * 1000])
async def test_chunk_extensions_and_trailers_have_the_same_limits(connection: ClientConnection, tail: bytes) -> None:
    connection.send(POST + b"transfer-encoding: chunked\r\n\r\n" + tail)
    assert (await connection.response()).status == 431
    await connection.closed()


async def test_trailers_are_not_read_as_headers(connection: ClientConnection, backend: FakeBackend) -> None:
    body = b'e\r\n{"prompt":"x"}\r\n0\r\nx-request-id: trailer\r\n\r\n'
    connection.send(POST + b"transfer-encoding: chunked\r\n\r\n" + body)
    response = await connection.response()
    assert response.status == 200
    assert response.headers["x-request-id"] != "trailer"


async def test_slow_headers_are_408(connection: ClientConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "HEAD_TIMEOUT_S", 0.01)
    connection.send(b"GET /hea")
    response = await connection.response()
    assert (response.status, response.error["code"]) == (408, "request_timeout")
    await connection.closed()


class Clock:
    """An event loop for a protocol, whose time a test advances."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._now_s = 1000.0
        self._timers: list[asyncio.TimerHandle] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def time(self) -> float:
        return self._now_s

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        self._timers.append(asyncio.TimerHandle(self._now_s + delay_s, callback, args, self._loop))
        return self._timers[-1]

    def advance(self, duration_s: float) -> None:
        self._now_s += duration_s
        due = [timer for timer in self._timers if timer.when() <= self._now_s]
        self._timers = [timer for timer in self._timers if timer not in due]
        for timer in due:
            if not timer.cancelled():
                timer._run()


@pytest.fixture
async def clock() -> Clock:
    return Clock()


async def test_each_request_gets_the_full_time_for_its_headers(backend: FakeBackend, clock: Clock) -> None:
    connection = ClientConnection(make_app(backend), loop=clock)
    for _ in range(3):
        connection.send(GET)
        clock.advance(HEAD_TIMEOUT_S - 1)
        connection.send(b"host: a\r\n\r\n")
        assert (await connection.response()).status == 200
        clock.advance(HEAD_TIMEOUT_S + 1)
    connection.send(GET)
    clock.advance(HEAD_TIMEOUT_S)
    assert (await connection.response()).status == 408
    await connection.end()


async def test_body_of_an_answered_request_must_end_in_time(
    connection: ClientConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_limits, "UNREAD_BODY_TIMEOUT_S", 0.01)
    connection.send(b"POST /health HTTP/1.1\r\nhost: a\r\ncontent-length: 5000\r\n\r\n")
    assert (await connection.response()).status == 405
    async with asyncio.timeout(60):
        while not connection.transport.closed:
            connection.send(b"x")
            await asyncio.sleep(0.001)
    assert connection.transport.aborted


async def test_silent_connection_is_closed(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.frontend.transport.serving.server.KEEP_ALIVE_TIMEOUT_S", 0.01)
    connection = ClientConnection(make_app(backend))
    await connection.closed()
    assert not connection.transport.output
    await connection.end()
    assert not connection.state.connections


async def test_only_the_first_of_two_requests_at_once_is_answered(connection: ClientConnection) -> None:
    connection.send((GET + b"host: a\r\n\r\n") * 1000)
    assert (await connection.response()).headers["connection"] == "close"
    await connection.closed()
    assert connection.transport.output.count(b"content-length: ") == 1


async def test_hidden_second_request_is_not_run(connection: ClientConnection, backend: FakeBackend) -> None:
    backend.script = silent
    hidden = request_bytes("POST", "/v1/completions", {"prompt": "hidden"})
    connection.send(request_bytes("POST", "/v1/completions", {"prompt": "x"}) + hidden)
    await backend.submitted.wait()
    connection.transport.reset()
    await connection.idle()
    assert len(backend.streams) == 1


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c"])
async def test_request_to_upgrade_is_answered_over_http_1_1(connection: ClientConnection, upgrade: bytes) -> None:
    headers = b"connection: upgrade, http2-settings\r\nupgrade: " + upgrade + b"\r\nhttp2-settings: AAMAAABk\r\n"
    connection.send(POST + headers + b'content-length: 14\r\n\r\n{"prompt"')
    connection.send(b':"x"}')
    assert (await connection.response()).status == 200
    assert (await connection.request("GET", "/health")).status == 200


async def test_get_with_an_upgrade_is_answered_too(connection: ClientConnection) -> None:
    connection.send(GET + b"host: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
    assert (await connection.response()).status == 200
    assert (await connection.request("GET", "/health")).status == 200


async def test_head_request_has_no_body(connection: ClientConnection) -> None:
    connection.send(b"HEAD /health HTTP/1.1\r\nhost: a\r\n\r\n")
    await connection.output(b"\r\n\r\n")
    assert connection.transport.output.endswith(b"\r\n\r\n")


async def test_garbage_after_a_running_stream_ends_only_that_connection(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    backend.script = silent
    connection.send(request_bytes("POST", "/v1/completions", {"prompt": "x", "stream": True}))
    await backend.submitted.wait()
    connection.send(b"\x00garbage\r\n\r\n")
    backend.streams[0].cancel() if connection.transport.closed else connection.transport.reset()
    await connection.idle()
    assert backend.streams[0].cancelled.is_set()


@pytest.fixture
async def open_connection(backend: FakeBackend, clock: Clock) -> AsyncIterator[Callable[[], ClientConnection]]:
    """Open connections to a worker that allows three."""
    app = make_app(backend)
    config = server_config(app, Connections(3))
    connections: list[ClientConnection] = []

    def connect() -> ClientConnection:
        connections.append(ClientConnection(app, config, clock))
        return connections[-1]

    yield connect
    for connection in connections:
        await connection.end()


async def serves(connection: ClientConnection) -> bool:
    return (await connection.request("GET", "/health")).status == 200


async def test_longest_idle_connection_is_closed_for_a_new_one(
    open_connection: Callable[[], ClientConnection], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = open_connection(), open_connection(), open_connection()
    for connection in (second, first, third):
        assert await serves(connection)
        clock.advance(MIN_IDLE_S)
    fourth = open_connection()
    await second.closed()
    fifth = open_connection()
    await first.closed()
    for connection in (third, fourth, fifth):
        assert await serves(connection)
    assert caplog.text.count("3 connections") == 1


async def test_busy_connections_stay_and_a_new_one_gets_429(
    open_connection: Callable[[], ClientConnection], backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.script = silent
    busy = [open_connection() for _ in range(3)]
    for connection in busy:
        connection.send(request_bytes("POST", "/v1/completions", {"prompt": "x", "stream": True}))
    for _ in range(5):
        refused = open_connection()
        response = await refused.response()
        assert (response.status, response.error["code"]) == (429, "overloaded")
        assert "retry-after" in response.headers
        await refused.closed()
        await asyncio.sleep(0)
    assert caplog.text.count("3 connections") == 1
    busy[0].transport.reset()
    assert await serves(open_connection())
    assert (await open_connection().response()).status == 429
    assert caplog.text.count("3 connections") == 2


async def test_new_connections_are_not_closed_for_newer_ones(open_connection: Callable[[], ClientConnection]) -> None:
    existing = [open_connection() for _ in range(3)]
    assert (await open_connection().response()).status == 429
    for connection in existing:
        assert await serves(connection)
