"""One server of a node: a real `penstock serve`, and what its actor would say of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from penstock.serve.fleet.cluster import Phase, Report
from penstock.serve.fleet.server_process import ServerProcess
from penstock.tools.processes import descendants
from tests.serve.fleet.upstreams import ask
from tests.system.processes import wait_until

OPTIONS = ("--port", "0", "--forward-pass", "fake", "--kv-budget", "16MB")
_JSON = {"Content-Type": "application/json"}
AS_ACTOR = """
import json, sys, threading
from penstock.serve.fleet.server_process import ServerProcess
server = ServerProcess(7, sys.argv[1:], {}, host="127.0.0.1", node_id="n")
while server.report()["phase"] != "up":
    threading.Event().wait(0.02)
print(json.dumps(server.report()["server"]), flush=True)
threading.Event().wait()
"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def report_of(server: ServerProcess) -> Report:
    return msgspec.convert(server.report(), Report)


@pytest.mark.usefixtures("environment")
def test_server_comes_up_marks_its_answers_and_drains() -> None:
    server = ServerProcess(0xAB, OPTIONS, {}, host="127.0.0.1", node_id="n")
    try:
        assert report_of(server).phase is Phase.STARTING
        wait_until(lambda: report_of(server).phase is Phase.UP, 60.0)
        address = report_of(server).server
        assert address is not None
        assert (address.number, address.host) == (0xAB, "127.0.0.1")
        status, answer = ask(address.port, "/v1/completions", '{"prompt": [5, 6], "max_tokens": 2}', _JSON)
        assert status == 200
        assert json.loads(answer)["id"].startswith("cmpl-00ab")
        status, answer = ask(address.port, "/v1/responses", '{"input": "x", "max_output_tokens": 16}', _JSON)
        assert status == 200
        assert json.loads(answer)["id"].removeprefix("resp_")[8:12] == "00ab"
        server.drain()
        wait_until(lambda: report_of(server).phase is Phase.ENDED, 60.0)
    finally:
        server.kill()


@pytest.mark.usefixtures("environment")
def test_server_that_cannot_start_says_why() -> None:
    server = ServerProcess(0, ("--model", "/does/not/exist"), {}, host="127.0.0.1", node_id="n")
    wait_until(lambda: report_of(server).phase is Phase.FAILED, 60.0)
    assert "/does/not/exist" in report_of(server).reason


@pytest.mark.usefixtures("environment")
def test_actor_and_server_die_together() -> None:
    def start() -> tuple[subprocess.Popen[str], int]:
        actor = subprocess.Popen([sys.executable, "-c", AS_ACTOR, *OPTIONS], stdout=subprocess.PIPE, text=True)
        assert actor.stdout is not None
        port: int = json.loads(actor.stdout.readline())["port"]
        return actor, port

    actor, port = start()
    serve = descendants(actor.pid)[0]
    os.kill(serve, signal.SIGKILL)
    with actor:
        assert actor.wait(30.0) == 1  # Ray then starts the actor again
    actor, port = start()
    with actor:
        actor.kill()
    wait_until(lambda: _refuses(port), 30.0)


def _refuses(port: int) -> bool:
    try:
        ask(port, "/health")
    except OSError:
        return True
    return False
