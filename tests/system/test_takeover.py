"""A sampled background stream of a real model goes on, event for event, when its worker is killed or restarted."""

from __future__ import annotations

import os
import re
import signal
from itertools import islice
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from tests.system.processes import Frontend, running, start_backend

if TYPE_CHECKING:
    from collections.abc import Iterator

BODY = {
    "input": "Tell me a story.",
    "temperature": 1.0,
    "max_output_tokens": 400,
    "ignore_eos": True,
    "background": True,
    "stream": True,
}
NUM_SEEN = 60


def worker_of(client: httpx.Client) -> int:
    """The process that has this client's connection."""
    return int(re.findall(r'worker="(\d+)"', client.get("/metrics").text)[0])


def events_in(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    found = (line[6:] for line in lines if line.startswith("data: "))
    return (msgspec.json.decode(line) for line in found if line != "[DONE]")


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    """Tests share one server: each begins with two workers that run."""
    directory = tmp_path_factory.mktemp("s")
    socket = directory / "private" / "backend.sock"
    backend = start_backend(socket, "--gpu", "none", "--kv-budget", "200MB", "--dtype", "fp32")
    frontend = Frontend(socket, "--workers", "2", "--state-dir", str(directory / "state"), "--drain-timeout-s", "0.01")
    with running(backend, frontend):
        frontend.wait_ready()
        yield frontend


def test_sampled_stream_goes_on_event_for_event_when_its_worker_is_killed(frontend: Frontend) -> None:
    with httpx.Client(base_url=frontend.url, timeout=30.0) as client:
        worker = worker_of(client)
        with client.stream("POST", "/v1/responses", json=BODY) as response:
            seen = list(islice(events_in(response.iter_lines()), NUM_SEEN))
            os.kill(worker, signal.SIGKILL)
    path = f"/v1/responses/{seen[0]['response']['id']}?stream=true"
    with httpx.Client(base_url=frontend.url, timeout=60.0) as client:
        with client.stream("GET", f"{path}&starting_after={NUM_SEEN - 1}") as response:
            rest = list(events_in(response.iter_lines()))
        with client.stream("GET", path) as response:
            whole = list(events_in(response.iter_lines()))
    assert len(seen) == NUM_SEEN
    assert seen + rest == whole
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert whole[-1]["type"] == "response.incomplete", whole[-1]
    assert whole[-1]["response"]["usage"]["output_tokens"] == BODY["max_output_tokens"]
    frontend.wait_for("again: its worker died")


@pytest.mark.parametrize("is_followed", [False, True])
def test_sampled_stream_goes_on_event_for_event_after_a_rolling_restart(frontend: Frontend, is_followed: bool) -> None:
    count = frontend.output.count("again: it was put back") + 1
    with httpx.Client(base_url=frontend.url, timeout=30.0) as client:
        worker = worker_of(client)
        with client.stream("POST", "/v1/responses", json=BODY) as response:
            events = events_in(response.iter_lines())
            seen = list(islice(events, NUM_SEEN))
            if is_followed:
                os.kill(worker, signal.SIGTERM)
                seen += events
    path = f"/v1/responses/{seen[0]['response']['id']}?stream=true"
    read_on = f"{path}&starting_after={NUM_SEEN - 1}"
    if is_followed:
        read_on = seen.pop()["error"]["message"].partition("GET ")[2]
    else:
        os.kill(worker, signal.SIGTERM)
    frontend.wait_for("again: it was put back", count=count)
    with httpx.Client(base_url=frontend.url, timeout=60.0) as client:
        with client.stream("GET", read_on) as response:
            rest = list(events_in(response.iter_lines()))
        with client.stream("GET", path) as response:
            whole = list(events_in(response.iter_lines()))
    frontend.wait_for(r"worker \d exited with status 0; restarting", count=count)
    assert seen + rest == whole
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert whole[-1]["type"] == "response.incomplete", whole[-1]
    assert whole[-1]["response"]["usage"]["output_tokens"] == BODY["max_output_tokens"]
