"""`penstock serve` with models that sleep: real processes, with the fake pass."""

from __future__ import annotations

import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from penstock.backend.model_names import DEMO_MODEL_DIR
from penstock.tools.processes import descendants, module_of
from tests.serve.serve_process import Serve, Start
from tests.system.processes import wait_until

ROOM_FOR_ONE = "400MB"


def states(client: httpx.Client) -> dict[str, str]:
    return {model["id"]: model["state"] for model in client.get("/v1/models").json()["data"]}


REQUEST: dict[str, object] = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0}


def complete(client: httpx.Client, model: str, **changes: object) -> httpx.Response:
    return client.post("/v1/completions", json=REQUEST | {"model": model} | changes)


def backends(serve: Serve) -> list[int]:
    return [pid for pid in descendants(serve.process.pid) if module_of(pid) == "penstock.backend.main"]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with a model, and one that cannot be used."""
    shutil.copytree(DEMO_MODEL_DIR, tmp_path / "models" / "found")
    (tmp_path / "models" / "broken").mkdir()
    (tmp_path / "models" / "broken" / "config.json").write_text("{}")
    return tmp_path / "models"


def test_models_take_turns_in_memory_for_one(start: Start, directory: Path) -> None:
    keys = directory / "keys"
    keys.write_text("sk-admin admin=yes\nsk-user\n")
    serve = start(
        "--model", "a=penstock-demo", "--models-dir", str(directory), "--models-memory", ROOM_FOR_ONE, "--log-json",
        "--api-key-file", str(keys),
    )  # fmt: skip
    serve.wait_until_ready()
    url, headers = f"http://127.0.0.1:{serve.port}", {"x-api-key": "sk-admin"}
    with httpx.Client(base_url=url, timeout=60, headers=headers) as client:
        assert states(client) == {"a": "awake", "broken": "asleep", "found": "asleep"}
        text = complete(client, "a").json()["choices"]
        woken = complete(client, "found")
        assert (woken.status_code, woken.json()["model"], woken.json()["choices"]) == (200, "found", text)
        assert states(client) == {"a": "asleep", "broken": "asleep", "found": "awake"}
        described = client.get("/v1/models/found").json()
        assert described["last_wake_seconds"] > 0
        assert described["capabilities"]["chat"]

        for command, state in (("unload", "asleep"), ("load", "awake")):
            path = f"/v1/models/{command}"
            assert client.post(path, json={"model": "found"}, headers={"x-api-key": "sk-user"}).status_code == 403
            assert client.post(path, json={"model": "found"}).json()["state"] == state
            assert states(client)["found"] == state

        refused = complete(client, "broken")
        assert refused.status_code == 503
        assert refused.json()["error"]["message"].startswith('"broken" could not be loaded: ')
        assert "broken" in client.get("/v1/models/broken").json()["last_error"]

        with pytest.raises(httpx.TimeoutException):
            client.post("/v1/completions", json={"model": "a", "prompt": "x"}, timeout=0.01)
        assert complete(client, "found").json()["choices"] == text  # the request for a was cancelled
        assert complete(client, "a", timeout_ms=1).json()["error"]["code"] == "timeout"

        (directory / "found" / "config.json").rename(directory / "config.json")
        assert complete(client, "a").json()["choices"] == text
        wait_until(lambda: states(client)["a"] == "awake", 60.0)
        failed = complete(client, "found")
        assert (failed.status_code, "retry-after" in failed.headers) == (503, True)
        assert "config.json" in failed.json()["error"]["message"]
        (directory / "config.json").rename(directory / "found" / "config.json")
        wait_until(lambda: complete(client, "found").status_code == 200, 60.0)
        assert complete(client, "a").json()["choices"] == text
    assert serve.stop() == 0


def test_model_falls_asleep_and_requests_wait_though_its_backend_is_killed_once_and_get_503_after_twice(
    start: Start, directory: Path
) -> None:
    serve = start(
        "--model", "a=penstock-demo", "--model", "b=penstock-demo", "--sleep-after-s", "0.5",
        "--keep-alive-interval-s", "0.05",
    )  # fmt: skip
    serve.wait_until_ready()
    for _ in range(2):
        serve.errors.wait_for(" sleeps after ")
    with httpx.Client(base_url=f"http://127.0.0.1:{serve.port}", timeout=60) as client:
        assert client.get("/ready").status_code == 200
        with client.stream("POST", "/v1/completions", json=REQUEST | {"model": "b", "stream": True}) as stream:
            wait_until(lambda: backends(serve), 60.0)
            os.kill(backends(serve)[0], signal.SIGKILL)
            answer = stream.read().decode()
        assert answer.startswith(": keep-alive\n\n")
        assert answer.endswith("data: [DONE]\n\n")
        serve.errors.wait_for("model b: its backend died by SIGKILL while it was loaded; once more")
        serve.errors.wait_for("model b is awake after ")
        serve.errors.wait_for("model b sleeps after ")
        assert set(states(client).values()) == {"asleep"}
        killed: set[int] = set()
        with ThreadPoolExecutor(1) as thread:
            failing = thread.submit(complete, client, "a")
            for _ in range(2):
                wait_until(lambda: set(backends(serve)) - killed, 60.0)
                (pid,) = set(backends(serve)) - killed
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        assert failing.result().status_code == 503
    assert serve.stop() == 0


def test_model_that_is_larger_than_the_memory_is_refused_at_the_start(start: Start) -> None:
    serve = start("--model", "a=penstock-demo", "--models-memory", "100MB")
    assert serve.process.wait() == 1
    (line,) = serve.errors.rest().splitlines()
    assert line.startswith("penstock serve: model a: it takes 333.")
    assert "--models-memory is 100.00 MB" in line
