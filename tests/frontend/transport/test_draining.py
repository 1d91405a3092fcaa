"""A server that stops answers what has reached it, and does not wait for what may never come."""

from __future__ import annotations

import asyncio
import mmap
import socket
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from penstock.frontend.transport.serving import server as serving
from penstock.frontend.transport.serving.accept_table import AcceptTable
from penstock.frontend.transport.serving.acceptor import SharedAcceptor
from penstock.frontend.transport.serving.connections import Connections
from penstock.frontend.transport.serving.server import HttpServer, server_config
from penstock.shm.messages import Finish
from tests.frontend.harness import ClientConnection, FakeBackend, make_app, request_bytes, silent, token_ids

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "the"}
BODY_BEGINS = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n{"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


# Requests


async def test_draining_serves_requests_that_arrive_and_lets_others_finish(backend: FakeBackend) -> None:
    app = make_app(backend)
    running, other = ClientConnection(app), ClientConnection(app)
    backend.script = silent
    running.send(request_bytes("POST", COMPLETIONS, {**BODY, "stream": True}))
    await backend.submitted.wait()
    app.exchanges.start_draining()
    not_ready = await other.request("GET", "/ready")
    assert (not_ready.status, not_ready.error["code"]) == (503, "shutting_down")
    assert "retry-after" in not_ready.headers
    assert (await other.request("GET", "/health")).status == 200
    backend.submitted.clear()
    other.send(request_bytes("POST", COMPLETIONS, BODY))
    await backend.submitted.wait()
    for stream in backend.streams:
        stream.push(*token_ids("the"), finish=Finish.LENGTH)
    assert (await other.response()).status == 200
    assert (await running.response()).events()[-1] == "[DONE]"
    for connection in (running, other):
        await connection.end()


@pytest.mark.parametrize("num_bytes", [50, 1 << 20])
async def test_draining_does_not_wait_for_a_body_that_does_not_arrive(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    monkeypatch.setattr("penstock.frontend.transport.exchange._LAST_DISCARD_TIMEOUT_S", 0.01)
    app = make_app(backend)
    connection = ClientConnection(app)
    connection.send(BODY_BEGINS % num_bytes)
    await asyncio.sleep(0)
    app.exchanges.start_draining()
    app.exchanges.sweep(time.monotonic() + 4)
    assert not connection.transport.output
    app.exchanges.sweep(time.monotonic() + 6)
    response = await connection.response()
    assert (response.status, response.error["code"]) == (503, "shutting_down")
    assert "retry-after" in response.headers
    await connection.idle()
    assert not backend.streams
    await connection.end()


# Connections


@pytest.mark.parametrize("has_begun", [False, True])
async def test_connection_is_not_closed_at_once_after_an_answer_that_did_not_say_so(
    backend: FakeBackend, has_begun: bool
) -> None:
    app, connections = make_app(backend), Connections()
    connection = ClientConnection(app, server_config(app, connections))
    backend.script = silent
    connection.send(request_bytes("POST", COMPLETIONS, {**BODY, "stream": has_begun}))
    await backend.submitted.wait()
    (stream,) = backend.streams
    if has_begun:
        stream.push(*token_ids("the"))
        await connection.output(b"the")
    connections.start_draining()
    stream.push(*token_ids("the"), finish=Finish.LENGTH)
    answer = await connection.response()
    assert answer.headers.get("connection") == (None if has_begun else "close")
    if has_begun:
        await connection.idle()
        now_s = asyncio.get_running_loop().time()
        connections.close_idle(now_s - 1)
        assert (await connection.request("GET", "/health")).headers["connection"] == "close"
    await connection.closed()
    await connection.end()


async def test_connection_waits_for_a_request_once_the_body_of_a_refused_one_has_arrived(backend: FakeBackend) -> None:
    connections = Connections()
    connection = ClientConnection(make_app(backend), server_config(make_app(backend), connections))
    connections.start_draining()
    connection.send(BODY_BEGINS.replace(b"completions", b"unknown") % 3)
    answer = await connection.response()
    assert (answer.status, "connection" in answer.headers) == (404, False)
    connections.close_idle(asyncio.get_running_loop().time())
    assert not connection.transport.closed
    connection.send(b"}}")
    connections.close_idle(asyncio.get_running_loop().time() - 60)
    assert not connection.transport.closed
    connections.close_idle(asyncio.get_running_loop().time())
    assert connection.transport.closed
    await connection.end()


@pytest.mark.parametrize("sent", [b"", HEALTH[:10], HEALTH + HEALTH[:10]])
async def test_connection_is_closed_that_stays_without_the_rest_of_a_head(backend: FakeBackend, sent: bytes) -> None:
    connections = Connections()
    connection = ClientConnection(make_app(backend), server_config(make_app(backend), connections))
    connection.send(sent[: len(HEALTH)])
    await connection.idle()
    connection.send(sent[len(HEALTH) :])
    now_s = asyncio.get_running_loop().time()
    connections.start_draining()
    connections.close_idle(now_s)
    connections.close_incomplete(now_s - 60)
    assert not connection.transport.closed
    connections.close_incomplete(now_s)
    assert connection.transport.closed
    await connection.end()


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


@pytest.fixture
async def server(backend: FakeBackend, listening: socket.socket) -> AsyncIterator[HttpServer]:
    app = make_app(backend)
    server = HttpServer(app, app.exchanges, listening, drain_timeout_s=30)
    running = asyncio.create_task(server.run())
    yield server
    async with asyncio.timeout(10):
        await running


async def test_refused_client_that_still_sends_reads_its_whole_answer(
    server: HttpServer, listening: socket.socket
) -> None:
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    writer.write(b"no HTTP\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")  # the answer's head
    for _ in range(64):  # a server that had closed would reset the connection
        writer.write(b"x" * (64 << 10))
        await writer.drain()
    assert b'"bad_http"' in await reader.read()
    writer.close()
    await writer.wait_closed()
    server.stop()


async def test_connection_without_a_request_outlives_idle_ones_when_the_server_stops(
    server: HttpServer, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_IDLE_CLOSE_DELAY_S", 0.0)
    clients = [await asyncio.open_connection(*listening.getsockname()) for _ in range(3)]
    (idle, to_idle), (new, to_new), (begun, to_begun) = clients
    to_idle.write(HEALTH)
    assert b"200 OK" in await idle.readuntil(b"}")
    to_begun.write(HEALTH[:10])
    server.stop()
    assert await idle.read() == b""
    to_new.write(HEALTH)
    to_begun.write(HEALTH[10:])
    for reader in (new, begun):
        answer = await reader.read()  # until the server closes the connection
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert b"connection: close" in answer.lower()
    for _, writer in clients:
        writer.close()


async def test_server_that_stops_does_not_wait_long_for_a_connection_without_a_request(
    server: HttpServer, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_LAST_HEADS_TIMEOUT_S", 0.0)
    reader, writer = await asyncio.open_connection(*listening.getsockname())
    server.stop()
    assert await reader.read() == b""
    writer.close()


async def test_server_ends_with_the_error_of_a_task_beside_it(
    backend: FakeBackend, listening: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(backend)
    monkeypatch.setattr("penstock.frontend.transport.open_exchanges._SWEEP_INTERVAL_S", 0.0)
    monkeypatch.setattr(app.exchanges, "sweep", lambda _: 1 // 0)
    with pytest.raises(ExceptionGroup) as raised:
        await asyncio.wait_for(HttpServer(app, app.exchanges, listening, drain_timeout_s=30).run(), 25)
    assert raised.group_contains(ZeroDivisionError)


@pytest.mark.parametrize("has_other_worker", [False, True])
async def test_last_worker_that_stops_takes_the_connections_that_wait(
    listening: socket.socket, has_other_worker: bool
) -> None:
    mapping = mmap.mmap(-1, 4096)
    table, other_table = (AcceptTable(mapping, 2, worker) for worker in range(2))
    if has_other_worker:
        other_table.open()
    begun: list[asyncio.Protocol] = []

    def new_connection() -> asyncio.Protocol:
        begun.append(asyncio.Protocol())
        return begun[-1]

    acceptor = SharedAcceptor(listening, table, new_connection)
    acceptor.start()
    clients = [socket.create_connection(listening.getsockname()) for _ in range(3)]
    acceptor.close()
    await acceptor.wait_closed()
    assert len(begun) == (0 if has_other_worker else 3)
    for client in clients:
        client.close()
