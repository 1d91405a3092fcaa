"""GET /engine/events: who may see it, what each tenant sees of others, and what slow viewers and the engine lose."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.frontend.access.admission import Admission
from penstock.frontend.access.api_keys import ApiKey, named_keys, tenant_salt
from penstock.frontend.endpoints.server import engine_feed as feed_module
from penstock.frontend.endpoints.server.engine_feed import MAX_QUEUED, EngineReader, Viewer
from penstock.frontend.settings import EngineView
from penstock.shm.memory.board import BackendBoard
from tests.backend.recorded import Recorded
from tests.frontend.harness import ClientConnection, FakeBackend, make_app, request_bytes

PATH = "/engine/events"
MINE, OTHERS, LEADS, OPERATOR = b"sk-mine", b"sk-others", b"sk-leads", b"sk-operator"


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    recorded = Recorded(pid=os.getpid(), num_pages=12, max_running=4, max_batch_tokens=8, max_context=48)
    yield recorded
    recorded.close()


@pytest.fixture
def backend(recorded: Recorded) -> FakeBackend:
    board = dict.fromkeys(BackendBoard.fields, 0) | {"pid": os.getpid(), "pages_total": 12, "cached_tokens": 7}
    return FakeBackend(backend_counters=board)


def run_requests(recorded: Recorded, *, first_id: int = 0) -> None:
    for number in range(6):
        tenant = tenant_salt(MINE if number % 2 else OTHERS)
        recorded.bench.submit([number, 4242 % 97, 3, 5], 9, request_id=first_id + number, frontend=77, tenant=tenant)
    for _ in range(6):
        recorded.bench.turn()


def connect(
    backend: FakeBackend, key: bytes | None = None, *, view: EngineView | None = None, **headers: str
) -> ClientConnection:
    """A connection that has asked for the stream, of a server with keys if one is given."""
    keys = [] if key is None else [*named_keys((MINE.decode(), OTHERS.decode())), ApiKey(LEADS, "boss", is_admin=True)]
    admission = Admission(keys, admin_key=OPERATOR.decode() if keys else None, engine_view=view)
    connection = ClientConnection(make_app(backend, admission=admission))
    given = [] if key is None else [("authorization", f"Bearer {key.decode()}")]
    sent = [(name.replace("_", "-"), value) for name, value in headers.items()]
    connection.send(request_bytes("GET", PATH, headers=[*given, *sent]))
    return connection


async def events(connection: ClientConnection, count: int = 2) -> list[dict[str, Any]]:
    """The first events; there are two in each update."""
    while (output := bytes(connection.transport.output)).count(b"data: ") < count or not output.endswith(b"\n\n\r\n"):
        connection.transport.changed.clear()
        await connection.transport.changed.wait()
    lines = [line for line in output.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line[6:]) for line in lines]


async def test_tenant_sees_its_own_requests_and_sums_of_the_others(recorded: Recorded, backend: FakeBackend) -> None:
    run_requests(recorded)
    board = backend.backend_counters
    assert board is not None
    backend.backend_counters = board | {"pages_total": 640, "running": 4, "waiting": 2, "pages_used": 231}
    for key in (MINE, OTHERS):
        connection = connect(backend, key)
        engine, own = (await events(connection))[:2]
        keys = {number for number, _ in own["requests"]}
        wanted = {f"1.{number}" for number in range(6) if (number % 2 == 1) == (key == MINE)}
        assert {name for _, name in own["requests"]} == wanted
        assert {request for sequence in engine["sequences"] for request in sequence[-1]} <= keys
        assert {request[0] for request in engine["waiting"]} | {event[2] for event in engine["events"]} <= keys
        assert (
            len(engine["sequences"]) + len(engine["waiting"]) == engine["num_waiting"] + len(engine["sequences"]) == 3
        )
        assert {event[1] for event in engine["events"]} >= {"arrived", "started"}
        assert {one[1] for one in engine["sequences"] + engine["waiting"]} == {own["tenant"]} == {0}
        assert (engine["steps"], engine["histograms"], engine["counters"]) == (
            [],
            {},
            {"pages_total": 640, "pages_used": 240},
        )
        assert engine["sums"].pop("tokens_per_s") >= 0
        assert engine["sums"] == {"running": 4, "waiting": 2, "pages": 240}  # rounded up to tens
        assert tenant_salt(MINE).hex().encode() not in bytes(connection.transport.output)
        await connection.end()


@pytest.mark.parametrize(
    ("key", "view", "sees_all"),
    [(MINE, "all", True), (MINE, "own", False), (LEADS, None, True), (OPERATOR, "own", True), (None, "own", False)],
)
async def test_operator_sees_all_requests_and_the_option_decides_for_others(
    recorded: Recorded, backend: FakeBackend, key: bytes | None, view: EngineView | None, sees_all: bool
) -> None:
    run_requests(recorded)
    connection = connect(backend, key, view=view)
    engine = (await events(connection))[0]
    assert (engine["sums"] is None, bool(engine["steps"])) == (sees_all, sees_all)
    assert len(engine["sequences"]) + len(engine["waiting"]) == (6 if sees_all else 0 if key is None else 3)
    await connection.end()


async def test_viewers_of_everything_see_all_numbers_and_their_own_names(
    recorded: Recorded, backend: FakeBackend
) -> None:
    run_requests(recorded)
    for key in (MINE, OTHERS):
        connection = connect(backend, key, view="all")
        engine, own = (await events(connection))[:2]
        assert (engine["type"], own["type"], engine["problem"]) == ("engine", "own", None)
        assert [step[0] for step in engine["steps"]] == list(range(len(engine["steps"])))
        assert engine["steps"]
        assert len(engine["sequences"]) + len(engine["waiting"]) == 6
        wanted = {f"1.{number}" for number in range(6) if (number % 2 == 1) == (key == MINE)}
        assert {name for _, name in own["requests"]} == wanted
        tenants = {sequence[1] for sequence in engine["sequences"]} | {request[1] for request in engine["waiting"]}
        assert tenants == {0, 1}
        mine = {request[0] for request in engine["waiting"] if request[1] == own["tenant"]}
        assert mine <= {number for number, _ in own["requests"]}
        assert engine["counters"]["cached_tokens"] == 7
        output = bytes(connection.transport.output)
        assert tenant_salt(MINE).hex().encode() not in output
        assert b"prompt" not in output.replace(b"prompt_tokens", b"")
        await connection.end()


async def test_steps_go_on_live_and_the_feed_ends_with_its_last_viewer(
    recorded: Recorded, backend: FakeBackend
) -> None:
    connection = connect(backend)
    first = (await events(connection))[0]
    assert first["steps"] == []
    run_requests(recorded)
    recorded.bench.run_dry()
    steps: list[list[Any]] = []
    count = 2
    while len(steps) < len(recorded.plans) - 1:  # the last result is written with the next plan
        count += 2
        steps = [step for event in await events(connection, count) for step in event.get("steps", ())]
    assert [step[0] for step in steps] == list(range(len(steps)))
    await connection.end()
    while left := asyncio.all_tasks() - {asyncio.current_task()}:  # the feed's task ends by itself
        await asyncio.wait(left)


async def test_slow_viewer_loses_steps_and_is_told_how_many(recorded: Recorded, backend: FakeBackend) -> None:
    reader = EngineReader(lambda: backend)  # type: ignore[arg-type, return-value]
    viewer = Viewer()
    viewer.put(*reader.read(wants_all=True, now_s=time.monotonic()))
    assert await viewer.next() is not None
    for number in range(1, 2 * MAX_QUEUED):
        run_requests(recorded, first_id=10 * number)
        recorded.bench.run_dry()
        viewer.put(*reader.read(wants_all=False, now_s=time.monotonic()))
    num_seen = num_lost = 0
    for _ in range(MAX_QUEUED):
        update, lost = await viewer.next() or pytest.fail("the stream ended")
        num_seen += len(json.loads(update.data[6:])["steps"])
        num_lost += lost
    reader.close()
    assert num_lost > 0
    assert len(recorded.plans) - num_seen - num_lost in (0, 1)  # the last result may not be written yet


async def test_viewer_that_does_not_read_holds_up_no_other(recorded: Recorded, backend: FakeBackend) -> None:
    app = make_app(backend)
    stalled, reading = ClientConnection(app), ClientConnection(app)
    for connection in (stalled, reading):
        connection.send(request_bytes("GET", PATH))
        await events(connection)
    stalled.transport.block()
    steps: list[list[Any]] = []
    count = 2
    for number in range(3):
        run_requests(recorded, first_id=10 * number)
        recorded.bench.run_dry()
        while len(steps) < len(recorded.plans) - 1:  # the last result is written with the next plan
            count += 2
            steps = [step for event in await events(reading, count) for step in event.get("steps", ())]
    assert stalled.transport.output.count(b"data: ") <= 4  # the first update, and one that waits in the socket
    await stalled.end()
    await reading.end()


@pytest.mark.parametrize("counters", [None, {"pid": 1 << 22}, {}])
async def test_without_a_recorder_the_stream_says_why(counters: dict[str, int] | None) -> None:
    connection = connect(FakeBackend(backend_counters=counters))
    engine = (await events(connection))[0]
    assert engine["problem"] is not None
    assert (engine["steps"], engine["sequences"]) == ([], [])
    await connection.end()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://evil.example"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost"}, 200),
        ({"sec_fetch_site": "same-origin"}, 200),
    ],
)
async def test_pages_of_other_sites_are_refused(backend: FakeBackend, headers: dict[str, str], status: int) -> None:
    connection = connect(backend, **headers)
    await connection.output(b"HTTP/1.1 %d" % status)
    if status == 403:
        answer = await connection.response()
        assert answer.json()["error"]["param"] == "origin"
        assert "allow it with --cors-allow-origin" in answer.json()["error"]["message"]
    await connection.end()


async def test_allowed_origin_and_wrong_key_and_too_many_viewers(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowing = Admission(named_keys(()), cors_origins=("https://ours.example",))
    connection = ClientConnection(make_app(backend, admission=allowing))
    connection.send(request_bytes("GET", PATH, headers=[("origin", "https://ours.example")]))
    await connection.output(b"access-control-allow-origin: https://ours.example")
    await connection.end()
    refused = await connect(backend, b"sk-wrong").response()
    assert (refused.status, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    monkeypatch.setattr(feed_module, "MAX_VIEWERS", 0)
    refused = await connect(backend).response()
    assert (refused.status, "retry-after" in refused.headers) == (429, True)
    assert "too many viewers of the engine" in refused.json()["error"]["message"]


async def test_head_request_ends_at_once(backend: FakeBackend) -> None:
    connection = ClientConnection(make_app(backend))
    connection.send(request_bytes("HEAD", PATH))
    await connection.output(b"text/event-stream")
    await connection.idle()
    await connection.end()
