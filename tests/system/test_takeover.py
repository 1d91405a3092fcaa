"""A sampled background stream of a real model goes on, event for event, when its worker is killed."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from tests.system.processes import Frontend, running, start_backend

if TYPE_CHECKING:
    from pathlib import Path

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


def events_of(response: httpx.Response, most: int | None = None) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for line in response.iter_lines():
        if line.startswith("data: "):
            events.append(msgspec.json.decode(line[6:]))
            if len(events) == most:
                break
    return events


def test_sampled_stream_goes_on_event_for_event_when_its_worker_is_killed(tmp_path: Path) -> None:
    socket = tmp_path / "private" / "backend.sock"
    backend = start_backend(socket, "--gpu", "none", "--kv-budget", "200MB", "--dtype", "fp32")
    frontend = Frontend(socket, "--workers", "2", "--state-dir", str(tmp_path / "state"))
    with running(backend, frontend):
        frontend.wait_ready()
        with httpx.Client(base_url=frontend.url, timeout=30.0) as client:
            worker = worker_of(client)
            with client.stream("POST", "/v1/responses", json=BODY) as response:
                seen = events_of(response, NUM_SEEN)
                os.kill(worker, signal.SIGKILL)
        path = f"/v1/responses/{seen[0]['response']['id']}?stream=true"
        with httpx.Client(base_url=frontend.url, timeout=60.0) as client:
            with client.stream("GET", f"{path}&starting_after={NUM_SEEN - 1}") as response:
                rest = events_of(response)
            with client.stream("GET", path) as response:
                whole = events_of(response)
    assert len(seen) == NUM_SEEN
    assert seen + rest == whole
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert whole[-1]["type"] == "response.incomplete", whole[-1]
    assert whole[-1]["response"]["usage"]["output_tokens"] == BODY["max_output_tokens"]
    frontend.wait_for("again: its worker died")
