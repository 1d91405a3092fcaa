"""`penstock serve` as a user types it: real processes, with the fake pass."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import select
import shlex
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.backend.options import BackendOptions
from penstock.commands.recorder.command import copy_records
from penstock.commands.recorder.history import read_history
from penstock.frontend.options import FrontendOptions
from penstock.serve.options import (
    ServeOptions,
    backend_options,
    private_socket_path,
    replica_options,
    select_options,
)
from penstock.shm.recording.file import read_recording
from penstock.shm.recording.rings import open_ring
from penstock.tools.processes import descendants
from tests.frontend.transport.test_listening import make_certificate
from tests.serve.serve_process import Start
from tests.system.processes import wait_until


def test_https_on_a_unix_socket_works_and_reads_its_keys_again(start: Start, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    path, keys = tmp_path / "web.sock", tmp_path / "keys"
    keys.write_text("sk-old name=old\n")
    serve = start("--uds", str(path), f"--ssl-certfile={certificate}", f"--ssl-keyfile={key}", f"--api-key-file={keys}")
    serve.output.wait_for(f"Ready: unix:{path} https://localhost/v1")
    transport = httpx.HTTPTransport(uds=str(path), verify=ssl.create_default_context(cafile=str(certificate)))
    with httpx.Client(transport=transport, base_url="https://localhost", timeout=60) as client:

        def status(secret: str) -> int:
            return client.get("/v1/models", headers={"authorization": f"Bearer {secret}"}).status_code

        assert (status("sk-old"), status("sk-new")) == (200, 401)
        keys.write_text("sk-new name=new\n")
        serve.process.send_signal(signal.SIGHUP)
        serve.errors.wait_for("read the API keys again")
        assert (status("sk-old"), status("sk-new")) == (401, 200)
    assert serve.stop() == 0
    assert not path.exists()


def test_server_runs_until_it_is_stopped_and_leaves_no_process_or_file(start: Start, tmp_path: Path) -> None:
    serve = start()
    serve.wait_until_ready()
    serve.output.wait_for("curl")
    assert serve.complete()[0] == 200
    children = descendants(serve.process.pid)
    assert children
    assert serve.stop() == 0
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert not [path for path in tmp_path.rglob("*") if not path.is_dir()]


def read_rows(path: Path) -> int:
    """The rows of all steps in a recording that is whole."""
    recording = read_recording(path)
    rows = [step.rows for life in read_history(recording) for step in life.steps.values()]
    assert recording.problem == ""
    assert None not in rows
    return sum(len(of_step or ()) for of_step in rows)


def test_killed_backend_and_killed_worker_are_restarted_and_ready_is_printed_once(start: Start, tmp_path: Path) -> None:
    serve = start("--workers", "2", "--state-dir", str(tmp_path / "state"))
    serve.wait_until_ready()
    text = serve.complete_when_back()  # one worker is ready; the other may get this request
    (backend,) = serve.pids("penstock.backend.main")
    for pid in (backend, serve.process.pid):
        ring, started = open_ring(pid)
        assert started.pid == backend
        copy_records(ring, tmp_path / f"{pid}.rec", 0.0, with_tokens=False)
        assert read_rows(tmp_path / f"{pid}.rec") > 0
        ring.close()
    os.kill(backend, signal.SIGKILL)
    serve.errors.wait_for("the last 10 s of the backend are in")
    (crash,) = (tmp_path / "state" / "crashes").iterdir()
    assert read_rows(crash) >= 8
    serve.errors.wait_for("backend died by SIGKILL; restarting")
    assert serve.complete_when_back() == text
    (again,) = serve.pids("penstock.backend.main")
    assert again != backend
    (frontend,) = (pid for pid in serve.pids("penstock.frontend.main") if descendants(pid))
    workers = descendants(frontend)
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    serve.errors.wait_for("died by SIGKILL; restarting")
    assert serve.complete_when_back() == text
    assert serve.stop(signal.SIGINT) == 0
    rest = serve.output.rest()
    assert rest.count("curl") == 1
    assert "Ready" not in rest


def ask_as_curl(command: str) -> str:
    """Send the request of a printed curl command; return the body of the answer."""
    program, buffering, *arguments = shlex.split(command.replace("$KEY", "sk-one"))
    assert (program, buffering) == ("curl", "-N")
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--unix-socket")
    parser.add_argument("-H", action="append")
    parser.add_argument("-d")
    curl = parser.parse_args(arguments)
    headers = dict(header.split(": ") for header in curl.H)
    with httpx.Client(transport=httpx.HTTPTransport(uds=curl.unix_socket), timeout=60) as client:
        return client.post(curl.url, content=curl.d, headers=headers).text


def run_python(lines: list[str]) -> str:
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, text=True, timeout=60
    ).stdout


@pytest.mark.parametrize(
    ("arguments", "ready"),
    [
        (["--uds", "{tmp_path}/web.sock"], "unix:{tmp_path}/web.sock http://localhost/v1"),
        (
            ["--host", "0.0.0.0", "--api-key", "sk-one", "--served-model-name", "it's"],  # noqa: S104 - a test's server
            "http://127.0.0.1:{port}/v1",
        ),
    ],
)
def test_printed_examples_work_as_printed(start: Start, tmp_path: Path, arguments: list[str], ready: str) -> None:
    serve = start(*(argument.format(tmp_path=tmp_path) for argument in arguments))
    output = serve.output
    assert output.next_nonempty() == "Ready: " + ready.format(port=serve.port, tmp_path=tmp_path)
    names = [*([] if "unix" in ready else ["Page"]), "Model", "Context", "Speed"]
    assert [output.next_nonempty().split()[0] for _ in names] == names
    answer = ask_as_curl(output.next_nonempty())
    assert answer.startswith("data: ")
    assert answer.endswith("data: [DONE]\n\n")
    lines = [output.next_nonempty().replace("YOUR_KEY", "sk-one") for _ in range(3)]
    assert run_python(lines).strip()


def test_a_further_model_has_a_backend_of_its_own(start: Start, tmp_path: Path) -> None:
    serve = start("--embedding-model", "penstock-demo-embed")
    serve.wait_until_ready()
    _, example = (serve.output.next_nonempty("curl ") for _ in range(2))
    vector = json.loads(ask_as_curl(example))["data"][0]["embedding"]
    url = f"http://127.0.0.1:{serve.port}"
    listed = httpx.get(f"{url}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["penstock-demo", "penstock-demo-embed"]
    assert listed[1]["embedding_dimensions"] == len(vector)
    _, second = sorted(serve.pids("penstock.backend.main"))
    text = serve.complete()
    os.kill(second, signal.SIGKILL)
    serve.errors.wait_for("embedding backend died by SIGKILL; restarting")
    assert serve.complete() == text
    assert json.loads(ask_as_curl(example))["data"][0]["embedding"] == vector  # it waits for the next backend
    assert serve.stop() == 0
    assert not list(tmp_path.rglob("*.sock*"))


def test_two_servers_share_neither_backend_nor_port_and_json_logs_have_no_examples(start: Start) -> None:
    first, second = start("--log-json", port=0), start()
    for serve in (first, second):
        serve.wait_until_ready()
    assert first.stop() == 0
    assert first.output.rest() == ""
    assert second.complete()[0] == 200


def test_busy_port_or_socket_ends_the_server_with_one_line(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "shared" / "backend.sock"
    first = start("--socket", str(path))
    first.wait_until_ready()
    (backend,) = first.pids("penstock.backend.main")
    for second, reason in (
        (start(port=first.port), f"port {first.port} on 127.0.0.1 is in use"),
        (start("--socket", str(path)), f"another backend (pid {backend}) serves {path}"),
    ):
        assert second.process.wait() == 1
        assert second.output.rest() == ""
        assert second.errors.rest() == f"penstock serve: {reason}\n"
    assert first.complete()[0] == 200


def test_next_server_removes_the_socket_of_a_killed_one(start: Start, tmp_path: Path) -> None:
    def sockets() -> set[str]:
        return {path.name.split(".")[0] for path in tmp_path.glob("penstock/*.sock*")}

    killed, living = start(), start()
    for serve in (killed, living):
        serve.wait_until_ready()
    backend = os.pidfd_open(killed.pids("penstock.backend.main")[0])
    killed.process.kill()
    killed.process.wait()
    assert select.select([backend], [], [], 60)[0]
    os.close(backend)
    assert sockets() == {f"serve-{serve.process.pid}" for serve in (killed, living)}
    following = start()
    following.wait_until_ready()
    assert sockets() == {f"serve-{serve.process.pid}" for serve in (living, following)}
    assert living.complete()[0] == 200


def test_nothing_outlives_a_supervisor_that_is_killed_during_its_start(start: Start) -> None:
    serve = start("--replicas", "2")
    wait_until(lambda: serve.pids("penstock.backend.main") and serve.pids("penstock.frontend.worker"), 60.0)
    left = descendants(serve.process.pid)
    serve.process.kill()
    serve.process.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in left), 60.0)


def test_missing_model_ends_the_server_with_one_line(start: Start, tmp_path: Path) -> None:
    serve = start("--model", str(tmp_path / "nowhere"))
    assert serve.process.wait() != 0
    (line,) = serve.errors.rest().splitlines()
    assert re.fullmatch(r"penstock serve: the model directory '.*nowhere' does not exist", line)


def test_serve_has_every_option_of_backend_and_frontend() -> None:
    names = {field.name for field in dataclasses.fields(ServeOptions)}
    for of in (BackendOptions, FrontendOptions):
        assert names >= {field.name for field in dataclasses.fields(of)}
    options = ServeOptions(model="m", port=81, socket=Path("/s"))
    assert select_options(options, BackendOptions) == BackendOptions(model="m", socket=Path("/s"))
    assert select_options(options, FrontendOptions) == FrontendOptions(port=81, socket=Path("/s"))


def test_a_further_model_may_have_another_device_and_cache(capsys: pytest.CaptureFixture[str]) -> None:
    options = ServeOptions(
        model="llm", gpu="0", host_kv_budget=1 << 30, embedding_model="e", embedding_gpu="none", rerank_model="r",
        embedding_cache=4, rerank_cache=0,
    )  # fmt: skip
    found = backend_options(options)
    assert [each.gpu for each in found.values()] == ["0", "none", "0"]
    assert [each.host_kv_budget for each in found.values()] == [1 << 30, "auto", 1 << 30]
    assert [each.embedding_cache for each in found.values()] == [4, 4, 0]
    with pytest.raises(SystemExit):
        backend_options(ServeOptions(rerank_gpu="1"))
    assert "--rerank-gpu is 1, but there is no --rerank-model" in capsys.readouterr().err


def test_replicas_take_the_devices_in_turn() -> None:
    def devices(**options: Any) -> list[str]:
        given = ServeOptions(model="llm", **options)
        return [each.gpu for each in (backend_options(given) | replica_options(given)).values()]

    assert devices() == ["auto"]
    assert devices(gpu="0,GPU-12") == ["0", "GPU-12"]
    assert devices(gpu="0,1", replicas=3) == ["0", "1", "0"]
    assert devices(gpu="none", replicas=2) == ["none", "none"]
    assert devices(gpu="1,0", embedding_model="e") == ["1", "1", "0"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "0,1", "replicas": 1}, "--gpu names 2 devices, but --replicas is 1"),
        ({"gpu": "0,0"}, "--gpu is 0,0: the devices of several replicas are different ones"),
        ({"gpu": "0,"}, "--gpu is 0,: the devices of several replicas are different ones"),
        ({"gpu": "0,auto"}, "--gpu is 0,auto: auto cannot be one of several"),
        ({"gpu": ",".join(map(str, range(65)))}, "--gpu names 65 devices; the limit is 64 replicas"),
        ({"gpu": "0,1", "model": None, "models": ("a=x", "b=y")}, "--gpu is 0,1, but only replicas of one model"),
    ],
)
def test_devices_that_replicas_cannot_have_are_refused(
    options: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        backend_options(ServeOptions(**{"model": "llm"} | options))
    assert message in capsys.readouterr().err


def test_default_socket_belongs_to_this_process() -> None:
    assert ServeOptions().socket == private_socket_path()
    assert str(os.getpid()) in private_socket_path().name


def test_keys_reach_the_frontend_only_and_no_command_line(start: Start) -> None:
    serve = start(environment={"PENSTOCK_API_KEY": "one,two"})
    serve.wait_until_ready()
    assert serve.complete() == (401, "invalid_api_key")
    assert serve.complete(key="two")[0] == 200
    for pid in descendants(serve.process.pid):
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"two" not in command
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert (b"two" in environment) == (b"frontend." in command)
        assert b"libtorch" not in Path(f"/proc/{pid}/maps").read_bytes()  # the fake pass needs none


def test_dry_run_prints_the_plan_and_serves_nothing(start: Start) -> None:
    serve = start("--dry-run", "--kv-budget", "1MiB")
    assert serve.process.wait() == 0
    plan = serve.output.rest()
    assert "KV budget" in plan
    assert "Ready" not in plan
    assert serve.errors.rest() == ""
