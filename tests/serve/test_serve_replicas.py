"""`penstock serve --replicas`: a backend that is killed hands its streams to the other."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.serve.serve_process import Serve, Start
from tests.serve.streams import IMPORTS_TESTS, SLOW, all_choices, bodies, samples
from tests.system.processes import wait_until


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short path, since sockets are below it: their paths are limited to 107 bytes."""
    return tmp_path_factory.mktemp("s")


MOST_TRIES = 5


def test_streams_of_a_killed_replica_go_on_with_the_same_text(start: Start, tmp_path: Path) -> None:
    serve = start(*SLOW, "--replicas", "2", "--log-json", environment=IMPORTS_TESTS)
    serve.wait_until_ready()
    requests = bodies(60)
    with httpx.Client(base_url=f"http://127.0.0.1:{serve.port}", timeout=60) as client:
        for _ in range(MOST_TRIES):  # on a busy machine the streams may end before the kill
            wait_until(lambda: sum(samples(client, "penstock_backend_up")) == 2, 60.0)
            expected = all_choices(client, requests)
            assert all(len(choice.text) > 50 for choices in expected for choice in choices)
            assert all_choices(client, requests, lambda: kill_a_backend(serve)) == expected
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
