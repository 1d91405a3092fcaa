"""`penstock serve --replicas`: a backend that is killed hands its streams to the other."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.processes import wait_until
from tests.tools.serve_process import Serve, Start


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short path, since sockets are below it: their paths are limited to 107 bytes."""
    return tmp_path_factory.mktemp("s")


GREEDY_AND_SEEDED: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"seed": 7, "logprobs": 2},
    {"seed": 8, "n": 2},
    {"seed": 9, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"seed": 10, "guided_regex": "[a-z ]{3000}"},
    {"temperature": 0, "echo": True, "logprobs": 0},
)
MOST_TRIES = 5


@dataclass
class Choice:
    text: str = ""
    logprobs: list[float | None] = field(default_factory=list)


def test_streams_of_a_killed_replica_go_on_with_the_same_text(start: Start, tmp_path: Path) -> None:
    serve = start("--replicas", "2", "--log-json")
    serve.wait_until_ready()
    bodies = [
        {"model": "penstock-demo", "prompt": [20 + n] * 5, "max_tokens": 1200, "ignore_eos": True} | settings
        for n, settings in enumerate(GREEDY_AND_SEEDED)
    ]
    with httpx.Client(base_url=f"http://127.0.0.1:{serve.port}", timeout=60) as client:
        for _ in range(MOST_TRIES):  # on a busy machine the streams may end before the kill
            wait_until(lambda: sum(samples(client, "penstock_backend_up")) == 2, 60.0)
            expected = all_choices(client, bodies)
            assert all(len(choice.text) > 1000 for choices in expected for choice in choices)
            assert all_choices(client, bodies, lambda: kill_a_backend(serve)) == expected
            if sum(samples(client, "penstock_worker_streams_resumed_total")):
                break
        wait_until(lambda: sum(samples(client, "penstock_backend_up")) == 2, 60.0)
    assert serve.stop() == 0
    ended = [json.loads(line) for line in serve.errors.rest().splitlines() if '"moves"' in line]
    assert {entry["moves"] for entry in ended} >= {0, 1}
    assert {entry["replica"] for entry in ended} >= {"1", "2"}
    assert not list(tmp_path.rglob("*.sock*"))


def kill_a_backend(serve: Serve) -> None:
    os.kill(min(serve.pids("penstock.backend.main")), signal.SIGKILL)


def all_choices(
    client: httpx.Client, bodies: list[dict[str, Any]], when_all_run: Callable[[], None] = lambda: None
) -> list[list[Choice]]:
    """Return, for each body, what its choices streamed. Calls when_all_run once each answer has begun."""
    begun = threading.Barrier(len(bodies), action=when_all_run)
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: choices_of(client, body, begun), bodies))


def choices_of(client: httpx.Client, body: dict[str, Any], begun: threading.Barrier) -> list[Choice]:
    choices = [Choice() for _ in range(body.get("n", 1))]
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        is_first = True
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                if is_first:
                    begun.wait(60.0)
                is_first = False
                for event in json.loads(line[6:])["choices"]:
                    choice = choices[event["index"]]
                    choice.text += event["text"]
                    choice.logprobs += (event["logprobs"] or {}).get("token_logprobs") or []
    return choices


def samples(client: httpx.Client, name: str) -> list[float]:
    """The values of a metric, one for each replica."""
    lines = client.get("/metrics").text.splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{")]
