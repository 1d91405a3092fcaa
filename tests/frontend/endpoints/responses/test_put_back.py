"""A worker that shuts down puts its background responses back, and another one on the same file runs them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.frontend.app import App
from penstock.frontend.endpoints.responses.storage import owner
from penstock.shm.messages import FailureCode, Finish
from tests.frontend.endpoints.responses.test_responses import HI, MODEL, PATH
from tests.frontend.endpoints.responses.test_takeover import STREAM, app_on, die, ended, next_worker, num_stored_events
from tests.frontend.harness import ClientConnection, FakeBackend, make_app, request_bytes, silent
from tests.frontend.named_events import REASONED_CALLS, named_events

TOKENS = MODEL.tokenizer.encode(REASONED_CALLS[:-60], add_special_tokens=False).ids
RESPONSES = "penstock.frontend.endpoints.responses"


def stored(file: Path, column: str) -> Any:
    """Return the column of the only response's row or run."""
    with contextlib.closing(sqlite3.connect(file)) as connection:
        ((value,),) = connection.execute(f"SELECT {column} FROM responses LEFT JOIN runs ON response = key")  # noqa: S608
    return value


@contextlib.asynccontextmanager
async def worker(file: Path, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[App]:
    """A worker that runs what others put back."""
    monkeypatch.setattr(f"{RESPONSES}.background.takeover._LOOKS_EVERY_S", 0.01)
    monkeypatch.setattr(f"{RESPONSES}.background.runs._PUBLISHES_EVERY_S", 0.01)
    monkeypatch.setattr(f"{RESPONSES}.background.event_log._LOOKS_EVERY_S", 0.01)
    app = app_on(backend, file)
    looks = asyncio.create_task(app.responses.run(app.context))
    try:
        yield app
    finally:
        looks.cancel()
        await asyncio.wait([looks])
        await app.responses.stop()
        app.store.close()


async def begin(app: App, backend: FakeBackend, body: dict[str, Any] = STREAM) -> tuple[ClientConnection, str]:
    """Begin the response; the backend generates a part of it. Return the connection that follows it, and its id."""
    connection = ClientConnection(app)
    connection.send(request_bytes("POST", PATH, body))
    await asyncio.wait_for(backend.submitted.wait(), 60)
    backend.streams[-1].push(*TOKENS)
    await connection.output(b"function_call_arguments" if body.get("stream") else b'"status":')
    return connection, connection.transport.output.split(b'"id":"')[1].split(b'"')[0].decode()


async def test_drain_lets_streams_end_and_puts_other_responses_back_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, file = FakeBackend(script=silent), tmp_path / "db"
    async with worker(file, backend, monkeypatch) as first:
        follower, _ = await begin(first, backend)
        connection, whole_id = await begin(first, backend, {**HI, "background": True})
        first.exchanges.start_draining()
        streamed, whole = backend.streams
        await asyncio.wait_for(whole.cancelled.wait(), 60)
        async with worker(file, FakeBackend(script=MODEL.says("Hello")), monkeypatch) as second:
            other = ClientConnection(second)
            answer = await ended(other, whole_id)
            await other.end()
        assert not streamed.cancelled.is_set()
        streamed.push(finish=Finish.LENGTH)
        events = named_events(await follower.response())
        assert len(first.exchanges) == 0
        await connection.end()
        await follower.end()
    assert (answer["status"], answer["output"][0]["content"][0]["text"]) == ("completed", "Hello")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("follows", ["its worker", "another worker"])
async def test_follower_learns_where_to_read_on_when_the_server_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, follows: str
) -> None:
    backend, file = FakeBackend(script=silent), tmp_path / "db"
    async with worker(file, backend, monkeypatch) as first, worker(file, FakeBackend(), monkeypatch) as second:
        follower, response_id = await begin(first, backend)
        for app in (first, second):
            app.exchanges.start_draining()
        if follows == "another worker":
            await follower.end()
            follower = ClientConnection(second)
            follower.send(request_bytes("GET", f"{PATH}/{response_id}?stream=true"))
            await follower.output(b"function_call_arguments")
            await first.responses.stop()
        else:
            first.exchanges.end_all()
        lines = (await follower.response()).body.decode().split("\n")
        await follower.end()
    *events, error = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert error["error"]["code"] == "shutting_down"
    last = events[-1]["sequence_number"]
    query = f"stream=true&starting_after={last}"
    assert error["error"]["message"].endswith(f"GET {PATH}/{response_id}?{query}")
    async with worker(file, FakeBackend(script=MODEL.says(REASONED_CALLS)), monkeypatch) as third:
        connection = ClientConnection(third)
        rest = named_events(await connection.request("GET", f"{PATH}/{response_id}?{query}"))
        await connection.end()
    assert [event["sequence_number"] for event in rest] == list(range(last + 1, last + 1 + len(rest)))
    assert rest[-1]["type"] == "response.completed"


@pytest.mark.parametrize("end", ["stop", "end_all"])
@pytest.mark.parametrize("body", [STREAM, {**HI, "background": True}], ids=["streamed", "whole"])
async def test_worker_that_ends_puts_back_what_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], end: str
) -> None:
    backend, file = FakeBackend(script=silent), tmp_path / "db"
    async with worker(file, backend, monkeypatch) as app:
        monkeypatch.setattr(f"{RESPONSES}.background.runs._PUBLISHES_EVERY_S", 60.0)
        connection, response_id = await begin(app, backend, body)
        num_seen = connection.transport.output.count(b"event: ")
        app.exchanges.start_draining()
        if end == "end_all":
            app.exchanges.end_all()
            await asyncio.gather(*app.responses._runs._tasks)
        else:
            await app.responses.stop()
        assert (stored(file, "owner"), stored(file, "num_takeovers")) == ("", -1)
        assert num_stored_events(file) >= num_seen
        assert (num_seen > 0) == (body is STREAM)
        await connection.end()
    async with worker(file, FakeBackend(script=MODEL.says(REASONED_CALLS)), monkeypatch) as app:
        connection = ClientConnection(app)
        answer = await ended(connection, response_id)
        await connection.end()
    assert answer["status"] == "completed"


async def test_response_that_another_worker_has_begun_again_is_put_back_before_it_is_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = await die(tmp_path, {**HI, "background": True})
    backend, is_asked = FakeBackend(), asyncio.Event()

    async def never(*_: Any, **__: Any) -> None:
        is_asked.set()
        await asyncio.Event().wait()

    with monkeypatch.context() as waiting:
        waiting.setattr("penstock.frontend.endpoints.answering.render_chat", never)
        waiting.setattr(owner, "lives", lambda name: name == "next")
        waiting.setattr(owner, "own_name", lambda: "next")
        async with worker(left.file, backend, monkeypatch) as app:
            await asyncio.wait_for(is_asked.wait(), 60)
            assert stored(left.file, "owner") == "next"
            app.exchanges.start_draining()
            await asyncio.wait_for(asyncio.gather(*app.responses._runs._tasks), 60)
            assert (stored(left.file, "owner"), stored(left.file, "num_takeovers")) == ("", 0)


async def test_worker_without_a_shared_store_ends_what_it_runs() -> None:
    backend = FakeBackend(script=silent)
    app = make_app(backend)
    connection = ClientConnection(app)
    answer = (await connection.post(PATH, {**HI, "background": True})).json()
    await app.responses.stop()
    found = (await connection.request("GET", f"{PATH}/{answer['id']}")).json()
    assert (found["status"], found["error"]["message"]) == ("failed", "the server is shutting down; retry later")
    await connection.end()


async def test_run_whose_task_is_cancelled_stays_what_it_is_for_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, file = FakeBackend(script=silent), tmp_path / "db"
    async with worker(file, backend, monkeypatch) as app:
        connection, _ = await begin(app, backend, {**HI, "background": True})
        (task,) = app.responses._runs._tasks
        task.cancel()
        async with asyncio.timeout(60):
            (error,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(error, asyncio.CancelledError)
        assert stored(file, "owner") == owner.own_name()
        assert len(app.exchanges) == 0
        await connection.end()


async def test_follower_goes_on_when_a_run_that_was_taken_over_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = await die(tmp_path, STREAM, REASONED_CALLS[:-60])
    backend = FakeBackend(script=silent)
    async with next_worker(left, backend, monkeypatch) as connection:
        await asyncio.wait_for(backend.submitted.wait(), 60)
        connection.send(request_bytes("GET", f"{PATH}/{left.response_id}?stream=true"))
        await connection.output(b"response.in_progress")
        backend.script = MODEL.says(REASONED_CALLS)
        backend.streams[0].push(finish=Finish.REJECTED, failure=FailureCode.OVERLOADED)
        events = named_events(await connection.response())
    assert len(backend.streams) == 2
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"
