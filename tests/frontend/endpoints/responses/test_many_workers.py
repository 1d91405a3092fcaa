"""Responses of two workers, as processes: made by one, continued, followed and cancelled through the other."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.frontend.endpoints.responses.storage import owner
from penstock.frontend.endpoints.responses.storage.orphans import MAX_TAKEOVERS
from tests.frontend.harness import VOCAB_SIZE
from tests.frontend.test_main import Frontend, directory, start
from tests.shm.scripted_backend import BackendProcess
from tests.system.processes import wait_until

__all__ = ["directory", "start"]  # fixtures

PATH = "/v1/responses"
LONG = {"input": "the cat", "temperature": 0, "background": True, "max_output_tokens": 900}
"""Nine seconds of work."""


class Worker:
    """A connection that stays with one worker."""

    def __init__(self, uds: Path) -> None:
        self.client = httpx.Client(transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://localhost", timeout=20)
        self.pid = int(re.findall(r'worker="(\d+)"', self.client.get("/metrics").text)[0])

    def create(self, **fields: Any) -> Any:
        return self.client.post(PATH, json={"input": "the cat", "max_output_tokens": 4, "temperature": 0, **fields})

    def get(self, response_id: str) -> Any:
        answer = self.client.get(f"{PATH}/{response_id}")
        return answer.json() if answer.status_code == 200 else answer.status_code

    def events(self, response_id: str, starting_after: int = -1) -> list[Any]:
        """Return the events until the stream ends."""
        query = "stream=true" if starting_after < 0 else f"stream=true&starting_after={starting_after}"
        answer = self.client.get(f"{PATH}/{response_id}?{query}")
        assert answer.status_code == 200, answer.text
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


@contextlib.contextmanager
def one_of_each(uds: Path, count: int = 2) -> Iterator[list[Worker]]:
    with contextlib.ExitStack() as stack:
        found: dict[int, Worker] = {}
        while len(found) < count:
            worker = Worker(uds)
            stack.callback(worker.client.close)
            found.setdefault(worker.pid, worker)
        yield list(found.values())


@pytest.fixture
def scripted(directory: Path) -> Iterator[BackendProcess]:
    card = {"model_dir": str(directory), "vocab_size": VOCAB_SIZE}
    with BackendProcess(directory / "b.sock", next_token="echoed", step_s=0.01, **card) as process:
        yield process


@pytest.fixture
def uds(directory: Path) -> Path:
    return directory / "web.sock"


@pytest.fixture
def serve(directory: Path, uds: Path, start: Callable[..., Frontend]) -> Callable[..., Frontend]:
    def serve(*options: str) -> Frontend:
        frontend = start("--workers", "2", "--uds", str(uds), "--state-dir", str(directory / "state"), *options)
        for _ in range(2):
            frontend.wait_for("serving scripted")
        return frontend

    return serve


def has_text(response: Any) -> bool:
    text: str = response["output"][0]["content"][0]["text"]
    return text != "" and "user\nthe cat".startswith(text[:12])


def begin_stream(worker: Worker, **fields: Any) -> str:
    """Begin a response in the background, hang up after its first event, and return its id."""
    with worker.client.stream("POST", PATH, json={**LONG, "stream": True, **fields}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: "):
                response_id: str = json.loads(line[6:])["response"]["id"]
                return response_id
    raise AssertionError("no event")


def test_responses_are_continued_followed_and_cancelled_through_another_worker(
    scripted: BackendProcess, serve: Callable[..., Frontend], uds: Path, directory: Path
) -> None:
    serve()
    with one_of_each(uds) as (one, other):
        previous = one.create().json()["id"]
        for turn in range(8):
            answer = (other, one)[turn % 2].create(previous_response_id=previous)
            assert answer.status_code == 200, answer.text
            previous = answer.json()["id"]
        assert other.get(previous) == one.get(previous)

        # Made in the background and streamed again: the same events, whoever sends them.
        response_id = begin_stream(one, max_output_tokens=100)
        early = other.create(previous_response_id=response_id)
        assert (early.status_code, early.json()["error"]["param"]) == (400, "previous_response_id")
        assert other.get(response_id)["status"] in ("queued", "in_progress")
        followed = other.events(response_id, starting_after=2)
        assert [event["sequence_number"] for event in followed] == list(range(3, 3 + len(followed)))
        assert followed[-1]["type"] == "response.incomplete"
        assert one.events(response_id)[3:] == followed
        assert other.get(response_id) == one.get(response_id) == followed[-1]["response"]

        # Cancelled, with what it has so far.
        response_id = one.client.post(PATH, json=LONG).json()["id"]
        wait_until(lambda: other.get(response_id)["output"], 20)
        cancelled = other.client.post(f"{PATH}/{response_id}/cancel").json()
        assert (cancelled["status"], one.get(response_id)) == ("cancelled", cancelled)
        assert has_text(cancelled)

        # Deleted while it runs: its worker ends it, and nothing of it is left.
        response_id = begin_stream(one)
        assert other.client.delete(f"{PATH}/{response_id}").status_code == 200
        assert one.get(previous)["id"] == previous
        wait_until(lambda: one.get(response_id) == 404, 20)
        assert other.get(response_id) == 404
        (database,) = (directory / "state").glob("unix-*/responses.sqlite3")
        assert stat.S_IMODE(database.parent.stat().st_mode) == 0o700
        files = list(database.parent.iterdir())
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
        wait_until(lambda: all(response_id.encode() not in file.read_bytes() for file in files), 20)


def text_of(events: list[Any]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


def ended(worker: Worker, response_id: str) -> Any:
    """Return the response once it has ended."""

    def has_ended() -> bool:
        return worker.get(response_id)["status"] not in ("queued", "in_progress")

    wait_until(has_ended, 30)
    return worker.get(response_id)


def test_background_responses_go_on_when_their_worker_is_killed(
    scripted: BackendProcess, serve: Callable[..., Frontend], uds: Path
) -> None:
    serve()
    with one_of_each(uds) as (one, other):
        undisturbed = one.create(**LONG | {"max_output_tokens": 200, "background": False}).json()
        whole_id = one.client.post(PATH, json={**LONG, "max_output_tokens": 200, "temperature": 1}).json()["id"]
        streamed_id = begin_stream(one, max_output_tokens=200)
        wait_until(lambda: other.get(streamed_id)["output"], 20)
        before = other.get(streamed_id)
        os.kill(one.pid, signal.SIGKILL)
        events = other.events(streamed_id)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert text_of(events) == undisturbed["output"][0]["content"][0]["text"]
        last = events[-1]["response"]
        assert events[-1]["type"] == "response.incomplete"
        assert (last["id"], last["created_at"]) == (streamed_id, before["created_at"])
        assert (other.get(streamed_id), other.events(streamed_id)) == (last, events)
        whole = ended(other, whole_id)
        assert whole["status"] == "incomplete"
        assert whole["output"][0]["content"] == undisturbed["output"][0]["content"]
        assert other.create(previous_response_id=whole_id).status_code == 200


def test_response_whose_workers_die_again_and_again_fails(
    scripted: BackendProcess, serve: Callable[..., Frontend], uds: Path, directory: Path
) -> None:
    frontend = serve()
    with one_of_each(uds, 1) as (one,):
        response_id = begin_stream(one)
        (database,) = (directory / "state").glob("unix-*/responses.sqlite3")

    def living_owner() -> int | None:
        """The worker that runs the response, unless it has died."""
        with contextlib.closing(sqlite3.connect(database)) as connection:
            (name,) = connection.execute("SELECT owner FROM responses").fetchone()
        return int(name.split("/")[-2]) if name and owner.lives(name) else None

    for _ in range(1 + MAX_TAKEOVERS):
        wait_until(lambda: living_owner() is not None, 30)
        pid = living_owner()
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        frontend.wait_for("died by SIGKILL; restarting")
    with one_of_each(uds, 1) as (worker,):
        failed = ended(worker, response_id)
        assert failed["status"] == "failed"
        assert failed["error"]["message"].startswith("4 workers died while they generated this response")
        events = worker.events(response_id)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert (events[-1]["type"], events[-1]["response"]) == ("response.failed", failed)


def test_responses_survive_the_death_of_the_server(
    scripted: BackendProcess, serve: Callable[..., Frontend], uds: Path, directory: Path
) -> None:
    frontend = serve("--response-store", "1MiB")
    with one_of_each(uds) as (one, other):
        kept = one.create().json()
        assert other.get(kept["id"]) == kept
        response_id = begin_stream(one, max_output_tokens=200)
        wait_until(lambda: other.get(response_id)["output"], 20)
    workers = frontend.workers()
    frontend.process.kill()
    for process in workers:
        process.wait(20)
    uds.unlink()
    serve("--response-store", "1MiB")
    with one_of_each(uds, 1) as (worker,):
        assert worker.get(kept["id"]) == kept
        assert has_text(ended(worker, response_id))
        assert worker.get(response_id)["status"] == "incomplete"
        # Another process holds the database: answers still come, and what needs it says so.
        (database,) = (directory / "state").glob("unix-*/responses.sqlite3")
        with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            assert worker.create().status_code == 200
            refused = worker.create(background=True)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "backend_unavailable")
            assert "retry-after" in refused.headers
            connection.execute("ROLLBACK")
        assert worker.get(kept["id"]) == kept


def test_server_that_stops_leaves_its_background_responses_to_its_next_start(
    scripted: BackendProcess, serve: Callable[..., Frontend], uds: Path
) -> None:
    frontend = serve()
    with one_of_each(uds) as (one, other):
        response_id = begin_stream(one, max_output_tokens=200)
        wait_until(lambda: other.get(response_id)["output"], 20)
    frontend.process.terminate()
    assert frontend.end() == 0
    assert "Traceback" not in frontend.log
    frontend = serve()
    with one_of_each(uds, 1) as (worker,):
        answer = ended(worker, response_id)
        events = worker.events(response_id)
    frontend.wait_for("again: it was put back")
    assert (answer["status"], events[-1]["response"]) == ("incomplete", answer)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
