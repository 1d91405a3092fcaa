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
        return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


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


def test_responses_survive_a_killed_worker_and_a_restart(
    scripted: BackendProcess, serve: Callable[..., Frontend], uds: Path, directory: Path
) -> None:
    frontend = serve("--response-store", "1MiB")
    with one_of_each(uds) as (one, other):
        kept = one.create().json()
        response_id = begin_stream(one)
        wait_until(lambda: other.get(response_id)["output"], 20)
        os.kill(one.pid, signal.SIGKILL)
        # Whoever follows the response learns of its end, after what had been generated.
        events = other.events(response_id)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert events[-1]["type"] == "response.failed"
        failed = events[-1]["response"]
        assert "worker that generated this response died" in failed["error"]["message"]
        assert has_text(failed)
        assert (other.get(response_id), other.get(kept["id"])) == (failed, kept)
        assert other.create(previous_response_id=kept["id"]).status_code == 200
    frontend.process.terminate()
    assert frontend.end() == 0
    serve("--response-store", "1MiB")
    with one_of_each(uds, 1) as (worker,):
        assert worker.get(kept["id"]) == kept
        assert worker.get(response_id) == failed
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
