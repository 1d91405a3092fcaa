"""Streams that linger, as a client sees them: it comes back with the last event's id and lacks nothing."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from penstock.frontend.settings import WorkerLimits
from penstock.frontend.transport.sse import split_events
from penstock.shm.client import TokenBatch
from penstock.shm.messages import MAX_RECORD_BYTES, FailureCode, Finish, Keep, StreamName
from tests.frontend.endpoints.responses.test_responses import MODEL, talking
from tests.frontend.harness import ClientConnection, FakeBackend, Response, request_bytes, says, silent, token_ids
from tests.frontend.named_events import REASONED_CALLS

LINGER = ("x-penstock-linger", "30")
CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
TOOL: dict[str, Any] = {"name": "get_weather", "parameters": {"type": "object"}}
TEXT = "Hello, 猫 and 🐈, hello again"

BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {**HI, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    (CHAT, {**HI, "n": 3, "stop": "again", "logprobs": True, "top_logprobs": 1}),
    (CHAT, {**HI, "tools": [{"type": "function", "function": TOOL}]}),
    ("/v1/completions", {"prompt": ["one", "two"], "n": 2, "stream": True, "echo": True}),
    ("/v1/messages", {**HI, "max_tokens": 500, "tools": [{"name": "get_weather", "input_schema": {"type": "object"}}]}),
    ("/v1/responses", {"input": "hi", "stream": True, "tools": [{"type": "function", **TOOL}]}),
]


def resumed(stream: str, last: int | None = None) -> bytes:
    headers = [] if last is None else [("last-event-id", str(last))]
    return request_bytes("GET", f"/v1/streams/{stream}", headers=headers)


def without_end_time(body: bytes) -> bytes:
    """A response's completed_at is the second in which its end was written."""
    return re.sub(rb'"completed_at":\d+', b'"completed_at":0', body)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_client_that_returns_gets_the_rest_byte_for_byte(path: str, body: dict[str, Any]) -> None:
    scores = body.get("logprobs")
    output = TEXT if "tools" not in body else REASONED_CALLS
    backend = FakeBackend(script=says(TEXT) if scores else MODEL.says(output, batch_size=1))
    if scores:
        del body["logprobs"], body["top_logprobs"]
    async with talking(backend) as connection:
        whole = await connection.request("POST", path, body, [LINGER])
        assert whole.status == 200, whole.body
        stream = whole.headers["x-penstock-stream"]
        events = split_events(whole.body)
        assert [int(event[4 : event.index(b"\n")]) for event in events] == list(range(len(events)))
        seeds = {request.request.sampling.seed for request in backend.streams}
        for batch_size, last in itertools.product((1, 3, 100), (None, 0, len(events) // 2, len(events) - 1)):
            backend.script = MODEL.says(output, batch_size=batch_size)
            connection.send(resumed(stream, last))
            rest = await connection.response()
            assert rest.headers["x-penstock-stream"] == stream
            expected = b"".join(events[0 if last is None else last + 1 :])
            assert without_end_time(rest.body) == without_end_time(expected)
        assert {request.request.sampling.seed for request in backend.streams if request.request.linger} == seeds


async def test_response_is_read_again_from_a_sequence_number() -> None:
    backend = FakeBackend(script=MODEL.says(TEXT))
    async with talking(backend) as connection:
        whole = await connection.request("POST", "/v1/responses", {"input": "hi", "stream": True}, [LINGER])
        events = split_events(whole.body)
        path = f"/v1/responses/{whole.headers['x-penstock-stream']}?stream=true"
        rest = await connection.request("GET", f"{path}&starting_after=4")
        assert without_end_time(rest.body) == without_end_time(b"".join(events[5:]))
        backend.records.clear()
        refused = await connection.request("GET", path)
        assert refused.error["param"] == "stream"


async def test_client_that_hangs_up_leaves_its_requests_running(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    backend.script = lambda _: [TokenBatch(token_ids("Hello"))]
    connection.send(request_bytes("POST", CHAT, {**HI, "n": 2}, [LINGER]))
    await connection.output(b"id: 1\n")
    connection.transport.reset()
    for stream in backend.streams:
        await stream.cancelled.wait()
        assert stream.keep is Keep.ALL
    first, second = (stream.request.linger for stream in backend.streams)
    assert first is not None
    assert second is not None
    assert (first.stream, first.linger_s, first.choice) == (second.stream, 30, 0)
    assert (second.choice, second.record) == (1, b"")


async def test_client_that_never_learned_the_id_leaves_nothing(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    backend.script = silent
    connection.send(request_bytes("POST", CHAT, HI, [LINGER]))
    await backend.submitted.wait()
    connection.transport.reset()
    await backend.streams[0].cancelled.wait()
    assert backend.streams[0].keep is Keep.NOTHING


async def test_stop_string_leaves_the_tokens_and_nothing_that_runs(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    backend.script = says("one two three", finish=Finish.NONE)
    answer = await connection.request("POST", CHAT, {**HI, "stop": "two"}, [LINGER])
    assert answer.status == 200
    assert backend.streams[0].keep is Keep.TOKENS


async def test_stream_is_dropped_by_its_url(connection: ClientConnection, backend: FakeBackend) -> None:
    answer = await connection.request("POST", CHAT, HI, [LINGER])
    stream = answer.headers["x-penstock-stream"]
    dropped = await connection.request("DELETE", f"/v1/streams/{stream}")
    assert (dropped.status, dropped.json()) == (200, {"object": "stream.deleted"})
    for method in ("GET", "DELETE"):
        gone = await connection.request(method, f"/v1/streams/{stream}")
        assert (gone.status, gone.error["code"]) == (404, "stream_not_found")


async def test_another_keys_stream_is_as_unknown_as_any(connect: Any, backend: FakeBackend) -> None:
    connection = connect(api_keys=["secret-1", "secret-2"])
    own, other = ("authorization", "Bearer secret-1"), ("authorization", "Bearer secret-2")
    answer = await connection.request("POST", CHAT, HI, [LINGER, own])
    stream = answer.headers["x-penstock-stream"]
    (name,) = backend.records
    assert (name, len(name.tenant)) == (StreamName(name.tenant, stream), 16)
    answers = [
        await connection.request("GET", f"/v1/streams/{path}", headers=[other]) for path in (stream, "chatcmpl-0")
    ]
    messages = [answer.error["message"].replace(stream, "chatcmpl-0") for answer in answers]
    assert messages[0] == messages[1]
    assert [answer.status for answer in answers] == [404, 404]
    assert (await connection.request("GET", f"/v1/streams/{stream}", headers=[own])).body == answer.body


@pytest.mark.parametrize("value", ["0", "601", "-1", "1.5", "abc", "", "9" * 30, "30, 30"])
async def test_linger_out_of_bounds_is_refused(value: str, connection: ClientConnection, backend: FakeBackend) -> None:
    refused = await connection.request("POST", CHAT, HI, [("x-penstock-linger", value)])
    assert refused.status == 400
    assert refused.error["param"] == "X-Penstock-Linger"
    assert "from 1 to 600" in refused.error["message"]
    assert not backend.streams


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": HI["messages"]}, "X-Penstock-Linger"),
        (CHAT, {**HI, "messages": [{"role": "user", "content": "x" * MAX_RECORD_BYTES}]}, "X-Penstock-Linger"),
        (CHAT, {**HI, "return_timings": True}, "return_timings"),
        (CHAT, {**HI, "timings_per_token": True}, "timings_per_token"),
        (CHAT, {**HI, "return_progress": True}, "return_progress"),
        ("/v1/completions", {"prompt": "a", "stream": True, "echo": True, "logprobs": 1}, "echo"),
        ("/v1/responses", {"input": "a", "stream": True, "background": True}, "X-Penstock-Linger"),
    ],
)
async def test_request_that_cannot_be_repeated_is_refused(
    path: str, body: dict[str, Any], param: str, connection: ClientConnection, backend: FakeBackend
) -> None:
    refused = await connection.request("POST", path, body, [LINGER])
    assert (refused.status, refused.error["param"]) == (400, param)
    assert not backend.streams


async def test_server_that_keeps_no_streams_says_so(connect: Any) -> None:
    refused = await connect(max_linger_s=0).request("POST", CHAT, HI, [LINGER])
    assert refused.status == 400
    assert "--max-linger-s 0" in refused.error["message"]
    assert WorkerLimits().max_linger_s == 600


@pytest.mark.parametrize("value", ["-1", "abc", "", str(1 << 31), "9" * 30, "1, 2"])
async def test_bad_last_event_id_is_refused(value: str, connection: ClientConnection) -> None:
    answer = await connection.request("POST", CHAT, HI, [LINGER])
    path = f"/v1/streams/{answer.headers['x-penstock-stream']}"
    refused = await connection.request("GET", path, headers=[("last-event-id", value)])
    assert (refused.status, refused.error["param"]) == (400, "Last-Event-ID")
    assert f"from 0 to {(1 << 31) - 1}" in refused.error["message"]


async def test_error_of_a_resumed_message_has_its_endpoints_form(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    answer = await connection.request("POST", "/v1/messages", {**HI, "max_tokens": 50}, [LINGER])
    backend.script = lambda _: [TokenBatch([], Finish.FAILED, FailureCode.TAKEN_OVER)]
    connection.send(resumed(answer.headers["x-penstock-stream"]))
    refused: Response = await connection.response()
    assert refused.json()["type"] == "error"
    assert (refused.status, "another connection" in refused.json()["error"]["message"]) == (409, True)


async def test_failure_in_a_stream_has_no_id(connection: ClientConnection, backend: FakeBackend) -> None:
    backend.script = lambda _: [TokenBatch(token_ids("Hello")), TokenBatch([], Finish.FAILED, FailureCode.INTERNAL)]
    answer = await connection.request("POST", CHAT, HI, [LINGER])
    *events, last = split_events(answer.body)
    assert events
    assert all(event.startswith(b"id: ") for event in events)
    assert last.startswith(b"data: {")
    assert b"error" in last


def sent_again(stream: str, last: int | None = None) -> list[tuple[str, str]]:
    return [LINGER, ("x-penstock-stream", stream), *([] if last is None else [("last-event-id", str(last))])]


def without_times(body: bytes) -> bytes:
    return re.sub(rb'"(created|created_at|completed_at)":\d+', rb'"\1":0', body)


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_request_sent_again_to_a_server_without_the_stream_gets_the_rest(path: str, body: dict[str, Any]) -> None:
    """Simulates the death of the machine that had the stream: the same id and seed, and the missing events."""
    body = {name: value for name, value in body.items() if "logprobs" not in name}
    backend = FakeBackend(script=MODEL.says(TEXT if "tools" not in body else REASONED_CALLS, batch_size=1))
    async with talking(backend) as connection:
        whole = await connection.request("POST", path, body, [LINGER])
        stream, events = whole.headers["x-penstock-stream"], split_events(whole.body)
        seeds = {request.request.sampling.seed for request in backend.streams}
        for last in (None, 0, len(events) // 2, len(events) - 1):
            backend.records.clear()
            rest = await connection.request("POST", path, body, sent_again(stream, last))
            assert rest.headers["x-penstock-stream"] == stream
            expected = b"".join(events[0 if last is None else last + 1 :])
            assert without_times(rest.body) == without_times(expected)
        assert {request.request.sampling.seed for request in backend.streams if request.request.linger} == seeds
        assert None not in seeds


async def test_request_sent_again_to_the_server_that_has_its_stream_reads_it(
    connection: ClientConnection, backend: FakeBackend
) -> None:
    whole = await connection.request("POST", CHAT, HI, [LINGER])
    stream, events = whole.headers["x-penstock-stream"], split_events(whole.body)
    rest = await connection.request("POST", CHAT, HI, sent_again(stream, 1))
    assert rest.body == b"".join(events[2:])
    assert backend.streams[-1].request.linger is not None
    other = await connection.request("POST", CHAT, {**HI, "max_tokens": 3}, sent_again(stream))
    assert (other.status, other.error["param"]) == (400, "X-Penstock-Stream")
    assert "another request" in other.error["message"]


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ([("x-penstock-stream", "chatcmpl-" + 24 * "0")], "X-Penstock-Stream"),
        (sent_again("nonsense"), "X-Penstock-Stream"),
        (sent_again("chatcmpl-" + 41 * "0"), "X-Penstock-Stream"),
        ([*sent_again("chatcmpl-" + 24 * "0"), ("last-event-id", "-1")], "Last-Event-ID"),
    ],
)
async def test_headers_of_a_request_sent_again_are_checked(
    connection: ClientConnection, headers: list[tuple[str, str]], param: str
) -> None:
    refused = await connection.request("POST", CHAT, HI, headers)
    assert (refused.status, refused.error["param"]) == (400, param)
