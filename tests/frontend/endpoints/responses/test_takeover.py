"""A background response whose worker has died runs again in another one, which reads a copy of the first one's file."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.frontend.access.admission import Admission
from penstock.frontend.access.api_keys import ApiKey, KeyLimits
from penstock.frontend.app import App
from penstock.frontend.endpoints.responses.storage import owner
from penstock.shm.client import Overloaded
from penstock.shm.messages import Finish
from tests.frontend.endpoints.responses.test_responses import HI, MODEL, PATH, TIME, WEATHER
from tests.frontend.harness import ClientConnection, FakeBackend, make_app, model_keeper, request_bytes, silent
from tests.frontend.named_events import REASONED_CALLS, named_events

Headers = Sequence[tuple[str, str]]
STREAM = {**HI, "background": True, "stream": True, "tools": [WEATHER, TIME]}
LIMITED = ApiKey(b"secret", "one", KeyLimits(requests_in_flight=1), weight=2.0)
BEARER = [("authorization", "Bearer secret")]


@dataclass
class Left:
    """The state that a worker left when it died."""

    file: Path
    response_id: str
    num_events: int
    """Stored ones."""
    seen: list[dict[str, Any]]
    """The events that its client has seen."""
    backend: FakeBackend


def app_on(backend: FakeBackend, file: Path, **options: Any) -> App:
    return make_app(
        backend,
        keeper=model_keeper(backend, MODEL.served(backend)),
        response_database=str(file),
        max_response_file_bytes=1 << 30,
        **options,
    )


def num_stored_events(file: Path) -> int:
    with contextlib.closing(sqlite3.connect(file)) as connection:
        return sum(data.count(b"\n\n") for (data,) in connection.execute("SELECT data FROM events"))


async def die(
    directory: Path, body: dict[str, Any], text: str = "", headers: Headers = (), admission: Admission | None = None
) -> Left:
    """Begin the response in a worker that dies after this text."""
    file, backend = directory / "first", FakeBackend(script=silent)
    app = app_on(backend, file, admission=admission)
    connection = ClientConnection(app)
    connection.send(request_bytes("POST", PATH, body, headers))
    await asyncio.wait_for(backend.submitted.wait(), 60)
    if text:
        backend.streams[0].push(*MODEL.tokenizer.encode(text, add_special_tokens=False).ids)
    await connection.output(b"response.reasoning_text.delta" if text else b'"status":"queued"')
    if text:
        (run,) = app.responses._runs._runs.values()
        await run.publish(with_body=True)
    response_id = connection.transport.output.split(b'"id":"')[1].split(b'"')[0].decode()
    with (
        contextlib.closing(sqlite3.connect(file)) as source,
        contextlib.closing(sqlite3.connect(directory / "second")) as target,
    ):
        source.backup(target)
    app.exchanges.end_all()
    seen = connection.transport.output.decode().split("data: ")[1:] if text else []
    await asyncio.gather(*app.responses._runs._tasks)
    await connection.end()
    app.store.close()
    second = directory / "second"
    events = [json.loads(data.partition("\n")[0]) for data in seen]
    return Left(second, response_id, num_stored_events(second), events, backend)


@contextlib.asynccontextmanager
async def next_worker(
    left: Left, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, admission: Admission | None = None
) -> AsyncIterator[ClientConnection]:
    """The worker that finds what was left."""
    monkeypatch.setattr(owner, "own_name", lambda: "next")
    monkeypatch.setattr(owner, "lives", lambda name: name == "next")
    monkeypatch.setattr("penstock.frontend.endpoints.responses.background.takeover._LOOKS_EVERY_S", 0.01)
    app = app_on(backend, left.file, admission=admission)
    connection = ClientConnection(app)
    looks = asyncio.create_task(app.responses.run(app.context))
    try:
        yield connection
    finally:
        looks.cancel()
        await asyncio.wait([looks])
        app.exchanges.end_all()
        await asyncio.gather(*app.responses._runs._tasks)
        await connection.end()
        app.store.close()


async def ended(connection: ClientConnection, response_id: str, headers: Headers = ()) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while True:
            answer = await connection.request("GET", f"{PATH}/{response_id}", headers=headers)
            found: dict[str, Any] = answer.json()
            if found["status"] not in ("queued", "in_progress"):
                return found
            await asyncio.sleep(0.01)


async def test_request_is_submitted_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {
        **HI,
        "background": True,
        "temperature": 1,
        "instructions": "be brief",
        "tools": [WEATHER, TIME],
        "stop": ["x", "y"],
        "logit_bias": {"7": 1.5},
        "structured_outputs": {"regex": "a+"},
        "cache_salt": "s",
        "metadata": {"a": "b"},
    }
    headers = [("x-penstock-coalesce", "off"), ("x-request-timeout-ms", "60000"), ("x-request-id", "mine"), *BEARER]
    left = await die(tmp_path, body, headers=headers, admission=Admission([LIMITED]))
    assert b"secret" not in left.file.read_bytes()
    backend = FakeBackend(script=MODEL.says("Hello"))
    async with next_worker(left, backend, monkeypatch, Admission([LIMITED])) as connection:
        answer = await ended(connection, left.response_id, BEARER)
        items = (await connection.request("GET", f"{PATH}/{left.response_id}/input_items", headers=BEARER)).json()
    first, second = left.backend.last, backend.last
    assert first.sampling.seed != 0
    assert first.deadline_s is not None
    assert second.deadline_s == pytest.approx(first.deadline_s, abs=0.05)
    assert replace(first, group=0, deadline_s=0.0) == replace(second, group=0, deadline_s=0.0)
    assert (answer["status"], answer["output"][0]["content"][0]["text"]) == ("completed", "Hello")
    assert (answer["metadata"], answer["instructions"], len(answer["tools"])) == ({"a": "b"}, "be brief", 2)
    assert items["data"][0]["content"] == [{"type": "input_text", "text": "hi"}]


@pytest.mark.parametrize("batch_size", [1, 64])
async def test_events_go_on_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    """Also if the tokens arrive together that came one by one, or the other way round."""
    left = await die(tmp_path, STREAM, REASONED_CALLS[:-60])
    assert len(left.seen) >= left.num_events > 20
    backend = FakeBackend(script=MODEL.says(REASONED_CALLS, batch_size=batch_size))
    async with next_worker(left, backend, monkeypatch) as connection:
        events = named_events(await connection.request("GET", f"{PATH}/{left.response_id}?stream=true"))
        answer = await ended(connection, left.response_id)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[: len(left.seen)] == left.seen
    assert (events[-1]["type"], events[-1]["response"]) == ("response.completed", answer)
    calls = [item["call_id"] for item in answer["output"] if item["type"] == "function_call"]
    assert [item["name"] for item in answer["output"] if item["type"] == "function_call"] == ["get_weather", "get_time"]
    assert calls[0] != calls[1]
    assert answer["output"][0]["content"][0]["text"] == "Hm, 猫."


@pytest.mark.parametrize("text", ["<think>\nHm, no", "<think>\nH", "Hello"])
async def test_answer_that_differs_from_what_was_seen_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    left = await die(tmp_path, STREAM, REASONED_CALLS[:-60])
    async with next_worker(left, FakeBackend(script=MODEL.says(text)), monkeypatch) as connection:
        events = named_events(await connection.request("GET", f"{PATH}/{left.response_id}?stream=true"))
        answer = await ended(connection, left.response_id)
        again = named_events(await connection.request("GET", f"{PATH}/{left.response_id}?stream=true"))
    assert [event["sequence_number"] for event in events] == list(range(left.num_events + 1))
    assert events[:-1] == left.seen[: left.num_events]
    assert events == again
    assert (events[-1]["type"], events[-1]["response"]) == ("response.failed", answer)
    assert "generated another answer" in answer["error"]["message"]


async def test_cancelled_response_stays_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = await die(tmp_path, STREAM, REASONED_CALLS[:-60])
    with contextlib.closing(sqlite3.connect(left.file, isolation_level=None)) as connection:
        connection.execute("UPDATE responses SET is_cancelled = 1")
    backend = FakeBackend(script=MODEL.says(REASONED_CALLS))
    async with next_worker(left, backend, monkeypatch) as client:
        assert (await ended(client, left.response_id))["status"] == "cancelled"
        events = named_events(await client.request("GET", f"{PATH}/{left.response_id}?stream=true"))
    assert events == left.seen[: left.num_events]
    assert backend.streams == []


async def test_cancel_while_it_catches_up_keeps_what_there_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = await die(tmp_path, STREAM, REASONED_CALLS[:-60])
    backend = FakeBackend(script=silent)
    async with next_worker(left, backend, monkeypatch) as client:
        await asyncio.wait_for(backend.submitted.wait(), 60)
        cancelled = (await client.request("POST", f"{PATH}/{left.response_id}/cancel")).json()
        events = named_events(await client.request("GET", f"{PATH}/{left.response_id}?stream=true"))
    assert cancelled["status"] == "cancelled"
    assert events == left.seen[: left.num_events]
    assert backend.streams[0].finish is Finish.CANCELLED


async def test_full_queue_delays_it_and_does_not_refuse_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = await die(tmp_path, {**HI, "background": True})
    backend, refused = FakeBackend(script=MODEL.says("Hello")), asyncio.Event()
    submit, num_refused = backend.submit, 0

    def submit_or_refuse(request: Any) -> Any:
        nonlocal num_refused
        if num_refused == 5:
            return submit(request)
        num_refused += 1
        refused.set()
        raise Overloaded(1, 10)

    monkeypatch.setattr(backend, "submit", submit_or_refuse)
    async with next_worker(left, backend, monkeypatch) as connection:
        await asyncio.wait_for(refused.wait(), 60)
        answer = await ended(connection, left.response_id)
    assert (num_refused, answer["status"]) == (5, "completed")


async def test_limits_of_its_key_count_it_and_do_not_refuse_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = await die(tmp_path, {**HI, "background": True}, headers=BEARER, admission=Admission([LIMITED]))
    backend, admission = FakeBackend(script=silent), Admission([LIMITED])
    account = admission._rate_limiter.account(LIMITED.salt)
    assert account is not None
    other = account.admit()  # the key has no request left
    async with next_worker(left, backend, monkeypatch, admission) as connection:
        await asyncio.wait_for(backend.submitted.wait(), 60)
        assert account.row.in_flight == 2
        other.release()
        assert (await connection.request("POST", PATH, HI, BEARER)).status == 429
        backend.streams[0].push(finish=Finish.STOP)
        await ended(connection, left.response_id, BEARER)
    assert account.row.in_flight == 0


async def test_response_that_cannot_be_read_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = await die(tmp_path, {**HI, "background": True})
    with contextlib.closing(sqlite3.connect(left.file, isolation_level=None)) as connection:
        connection.execute("UPDATE runs SET request = CAST('{}' AS BLOB)")
    async with next_worker(left, FakeBackend(), monkeypatch) as client:
        assert "cannot be run again" in (await ended(client, left.response_id))["error"]["message"]
