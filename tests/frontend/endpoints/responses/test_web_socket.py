"""/v1/responses over a WebSocket, with the client of the library `websockets`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from socket import create_server
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, ConnectionClosedError, ConnectionClosedOK, InvalidStatus

from penstock.frontend.access.admission import Admission
from penstock.frontend.access.api_keys import named_keys
from penstock.frontend.app import App
from penstock.frontend.endpoints.responses.web_socket import MAX_QUEUED, LatestResponses
from penstock.frontend.transport.serving.server import HttpServer
from penstock.shm.client import Overloaded
from penstock.shm.messages import Finish
from tests.frontend.clients.test_openai_sdk import serving
from tests.frontend.endpoints.responses.test_store import response as stored
from tests.frontend.harness import TOKENIZER, FakeBackend, make_app, says, silent, token_ids

HI: dict[str, Any] = {"type": "response.create", "input": "hi", "store": False}


@contextlib.asynccontextmanager
async def socket_to(app: App, **headers: str) -> AsyncIterator[ClientConnection]:
    async with (
        serving(app) as url,
        connect(url.replace("http", "ws") + "/responses", additional_headers=headers, proxy=None) as socket,
    ):
        yield socket


@pytest.fixture
async def socket(backend: FakeBackend) -> AsyncIterator[ClientConnection]:
    async with socket_to(make_app(backend)) as socket:
        yield socket


async def receive(socket: ClientConnection) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(await asyncio.wait_for(socket.recv(), 60))
    return event


async def answer(socket: ClientConnection, **fields: Any) -> list[dict[str, Any]]:
    """Send a request; return the events of its answer."""
    await socket.send(json.dumps(HI | fields))
    return await rest_of(socket)


async def rest_of(socket: ClientConnection) -> list[dict[str, Any]]:
    events = [await receive(socket)]
    while events[-1]["type"] not in ("error", "response.completed", "response.incomplete", "response.failed"):
        events.append(await receive(socket))
    return events


async def error_of(socket: ClientConnection, **fields: Any) -> tuple[int, str, str | None]:
    (event,) = await answer(socket, **fields)
    assert event["type"] == "error"
    return event["status"], event["error"]["code"], event["error"]["param"]


async def refusal_of(app: App, **headers: str) -> tuple[int, str]:
    """Return the status and the code with which the upgrade is refused."""
    with pytest.raises(InvalidStatus) as refused:
        async with socket_to(app, **headers):
            pass
    body = json.loads(refused.value.response.body or b"")
    return refused.value.response.status_code, body["error"]["code"]


def prompt(backend: FakeBackend) -> str:
    text: str = TOKENIZER.decode(list(backend.last.token_ids), skip_special_tokens=False)
    return text


async def test_responses_follow_each_other_on_one_connection(socket: ClientConnection, backend: FakeBackend) -> None:
    for text in ("Hello!", "Again, 猫 🐈."):
        backend.script = says(text)
        events = await answer(socket)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == text
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == text


async def test_unstored_response_is_continued_on_its_connection_only(backend: FakeBackend) -> None:
    app = make_app(backend)
    async with socket_to(app) as socket:
        first = (await answer(socket, input="one"))[-1]["response"]
        second = (await answer(socket, input="two", previous_response_id=first["id"]))[-1]["response"]
        assert "one" in prompt(backend)
        assert "Hello, world!" in prompt(backend)
        assert second["previous_response_id"] == first["id"]
        assert second["store"] is False
    async with socket_to(app) as other:
        missing = await error_of(other, previous_response_id=second["id"])
        assert missing == (400, "previous_response_not_found", "previous_response_id")
        assert (await answer(other, input="recovered"))[-1]["type"] == "response.completed"


async def test_stored_response_is_continued_anywhere(backend: FakeBackend) -> None:
    app = make_app(backend)
    async with socket_to(app) as socket:
        first = (await answer(socket, input="one", store=True))[-1]["response"]
    async with socket_to(app) as socket:
        await answer(socket, input="two", previous_response_id=first["id"])
        assert "one" in prompt(backend)


async def test_failed_continuation_ends_its_chain(socket: ClientConnection) -> None:
    first = (await answer(socket))[-1]["response"]["id"]
    result = [{"type": "function_call_output", "call_id": "call_missing", "output": "?"}]
    assert await error_of(socket, input=result, previous_response_id=first) == (400, "invalid_value", "input")
    again = await error_of(socket, previous_response_id=first)
    assert again == (400, "previous_response_not_found", "previous_response_id")


async def test_continuation_that_may_be_retried_keeps_its_chain(socket: ClientConnection, backend: FakeBackend) -> None:
    first = (await answer(socket))[-1]["response"]["id"]
    backend.refusal = Overloaded(1, 100)
    assert (await error_of(socket, previous_response_id=first))[:2] == (429, "overloaded")
    backend.refusal = None
    assert (await answer(socket, previous_response_id=first))[-1]["type"] == "response.completed"


async def test_request_that_generates_nothing_is_continued(socket: ClientConnection, backend: FakeBackend) -> None:
    events = await answer(socket, input="warm", generate=False)
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.completed"]
    assert not backend.streams
    response = events[-1]["response"]
    assert response["output"] == []
    await answer(socket, input="go", previous_response_id=response["id"])
    assert prompt(backend).count("<|im_start|>") == 3  # both messages, and the start of the answer


async def test_stream_id_is_on_every_event(socket: ClientConnection) -> None:
    assert {event["stream_id"] for event in await answer(socket, stream_id="a")} == {"a"}
    assert {event["stream_id"] for event in await answer(socket, stream_id="b", top_p=7)} == {"b"}


BAD_MESSAGES = [
    ("{", "invalid_json", None),
    ("[1]", "invalid_value", None),
    ('{"type": 1}', "invalid_value", None),
    ('{"type": "response.steer"}', "invalid_value", "type"),
    ('{"type": "response.create"}', "missing_required_parameter", "input"),
    ('{"type": "response.create", "input": "x", "background": true}', "invalid_value", "background"),
    ('{"type": "response.create", "input": "x", "temperature": 9}', "invalid_value", "temperature"),
    ('{"type": "response.create", "input": "x", "stream_id": ""}', "invalid_value", "stream_id"),
]


async def test_bad_message_is_an_error_event_and_the_connection_goes_on(socket: ClientConnection) -> None:
    for message, code, param in BAD_MESSAGES:
        await socket.send(message)
        (event,) = await rest_of(socket)
        assert (event["status"], event["error"]["code"], event["error"]["param"]) == (400, code, param), message
    assert (await answer(socket))[-1]["type"] == "response.completed"


async def test_end_of_the_connection_cancels_its_response(backend: FakeBackend) -> None:
    backend.script = silent
    app = make_app(backend)
    async with serving(app) as url:
        async with connect(url.replace("http", "ws") + "/responses", proxy=None) as socket:
            await socket.send(json.dumps(HI))
            await socket.send(json.dumps(HI))
            await asyncio.wait_for(backend.submitted.wait(), 60)
        await asyncio.wait_for(backend.streams[0].cancelled.wait(), 60)
    assert len(backend.streams) == 1  # the request that waited is not begun
    assert not app.exchanges


async def test_requests_beyond_the_queue_are_refused(socket: ClientConnection, backend: FakeBackend) -> None:
    backend.script = silent
    await socket.send(json.dumps(HI))
    await asyncio.wait_for(backend.submitted.wait(), 60)
    for _ in range(MAX_QUEUED + 1):
        await socket.send(json.dumps(HI))
    (event,) = await rest_of(socket)
    assert (event["status"], event["error"]["code"]) == (429, "overloaded")
    assert str(MAX_QUEUED) in event["error"]["message"]
    backend.script = says("Hello!")
    backend.streams[0].push(finish=Finish.LENGTH)
    for _ in range(MAX_QUEUED + 1):
        await rest_of(socket)
    assert len(backend.streams) == MAX_QUEUED + 1


async def test_message_over_the_limit_is_refused_or_closes_the_connection(
    socket: ClientConnection, backend: FakeBackend
) -> None:
    async with socket_to(make_app(backend, max_body_bytes=200)) as other:
        (event,) = await answer(other, input="x" * 200)
    assert (event["status"], event["error"]["message"]) == (413, "the body is larger than the limit of 200 bytes")
    with pytest.raises(ConnectionClosedError) as closed:
        await answer(socket, input="x" * (2 << 20))
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1009


async def test_idle_connection_is_closed(backend: FakeBackend) -> None:
    async with socket_to(make_app(backend, idle_socket_timeout_s=0.05)) as socket:
        with pytest.raises(ConnectionClosedOK) as closed:
            await socket.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.reason == "no request for 0.05 s"


async def test_server_that_stops_ends_the_response_first(backend: FakeBackend) -> None:
    backend.script = silent
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(make_app(backend)))
        socket = await connect(url.replace("http", "ws") + "/responses", proxy=None)
        await socket.send(json.dumps(HI))
        await asyncio.wait_for(backend.submitted.wait(), 60)
        stopping = asyncio.create_task(stack.aclose())
        (event,) = await rest_of(socket)
        assert (event["status"], event["error"]["code"]) == (503, "shutting_down")
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
        await stopping
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1012


async def test_response_that_runs_may_end_when_the_server_stops(backend: FakeBackend) -> None:
    backend.script = silent
    app = make_app(backend)
    listening = create_server(("127.0.0.1", 0))
    url = f"ws://127.0.0.1:{listening.getsockname()[1]}/v1/responses"
    server = HttpServer(app, app.exchanges, listening, drain_timeout_s=60, max_connections=8)
    running = asyncio.create_task(server.run())
    async with connect(url, proxy=None) as idle, connect(url, proxy=None) as socket:
        await socket.send(json.dumps(HI))
        await asyncio.wait_for(backend.submitted.wait(), 60)
        server.stop()
        with pytest.raises(ConnectionClosed) as idle_closed:
            await asyncio.wait_for(idle.recv(), 60)
        backend.streams[0].push(*token_ids("late"), finish=Finish.LENGTH)
        assert (await rest_of(socket))[-1]["response"]["output"][0]["content"][0]["text"] == "late"
        with pytest.raises(ConnectionClosed) as closed:
            await asyncio.wait_for(socket.recv(), 60)
    await running
    for each in (idle_closed, closed):
        assert each.value.rcvd is not None
        assert each.value.rcvd.code == 1012


async def test_server_may_stop_while_a_connection_closes(backend: FakeBackend) -> None:
    app = make_app(backend)
    listening = create_server(("127.0.0.1", 0))
    server = HttpServer(app, app.exchanges, listening, drain_timeout_s=60, max_connections=8)
    running = asyncio.create_task(server.run())
    async with connect(f"ws://127.0.0.1:{listening.getsockname()[1]}/v1/responses", proxy=None) as idle:
        (connection,) = server._server.server_state.connections
        connection.close_for_another()
        connection.shutdown()
        with pytest.raises(ConnectionClosed):
            await asyncio.wait_for(idle.recv(), 60)
    server.stop()
    await running


async def test_upgrade_needs_a_key(backend: FakeBackend) -> None:
    app = make_app(backend, api_keys=("secret",))
    assert await refusal_of(app) == (401, "invalid_api_key")
    async with socket_to(app, Authorization="Bearer secret") as socket:
        assert (await answer(socket))[-1]["type"] == "response.completed"
        app.context.admission.set_keys(named_keys(("other",)))
        assert (await error_of(socket))[:2] == (401, "invalid_api_key")


async def test_page_of_another_origin_is_refused(backend: FakeBackend) -> None:
    assert await refusal_of(make_app(backend), Origin="https://evil.example") == (403, "origin_not_allowed")
    allowed = make_app(backend, admission=Admission((), cors_origins=("https://app.example",)))
    async with socket_to(allowed, Origin="https://app.example") as socket:
        assert (await answer(socket))[-1]["type"] == "response.completed"
    async with serving(make_app(backend)) as url:
        own = url.removesuffix("/v1")
        async with connect(url.replace("http", "ws") + "/responses", origin=own, proxy=None) as socket:  # type: ignore[arg-type]
            assert (await answer(socket))[-1]["type"] == "response.completed"


async def test_foreign_host_is_refused(backend: FakeBackend) -> None:
    app = make_app(backend, admission=Admission((), allowed_hosts=("other.example",)))
    async with serving(app) as url:
        with pytest.raises(InvalidStatus) as refused:
            await connect(
                url.replace("http://127.0.0.1", "ws://rebound.example") + "/responses", host="127.0.0.1", proxy=None
            )
    assert refused.value.response.status_code == 403


def test_latest_responses_are_bounded() -> None:
    latest = LatestResponses(max_bytes=3 * stored("a").num_bytes)
    for name in "abcd":
        latest.put(name, stored(name))
    assert [latest.get(name) is not None for name in "abcd"] == [False, True, True, True]
    latest.put("b", stored("e"))
    latest.drop("c")
    latest.put("f", stored("f"))
    assert [latest.get(name) is not None for name in "bcdf"] == [True, False, True, True]
