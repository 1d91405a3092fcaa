"""The frontend command as processes: parent, workers, signals, exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from penstock.frontend.main import app
from tests.frontend.harness import VOCAB_SIZE, save_model_files
from tests.shm.scripted_backend import BackendProcess

BODY = {"prompt": "the cat", "max_tokens": 2, "temperature": 0}


class Frontend:
    """Run `frontend` on a free port and keep its standard error."""

    def __init__(self, socket_path: Path, *options: str, max_fds: int | None = None) -> None:
        argv = [] if max_fds is None else ["sh", "-c", f'ulimit -n {max_fds}; exec "$@"', "sh"]
        argv += [
            sys.executable,
            "-P",
            "-m",
            "penstock.frontend.main",
            "--socket",
            str(socket_path),
            "--port",
            "0",
            *options,
        ]
        self.process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        self.log = ""
        address = self.wait_for(r"listening on (\S+)")
        self.client = httpx.Client(base_url=address if "://" in address else "http://localhost", timeout=60)

    def wait_for(self, pattern: str) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line
            if match := re.search(pattern, line):
                return match[1] if match.groups() else match[0]
        raise AssertionError(f"ended without {pattern}: {self.log}")

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def wait_until_closed(self) -> None:
        """Wait until no new connection is accepted."""
        with contextlib.suppress(httpx.TransportError):
            while True:
                httpx.get(self.client.base_url.join("/health"))
                time.sleep(0.02)

    def end(self) -> int:
        """Return the exit status."""
        assert self.process.stderr is not None
        if not self.process.stderr.closed:
            self.log += self.process.stderr.read()
            self.process.stderr.close()
        return self.process.wait()


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:
        save_model_files(Path(directory), marks_turns=False)
        yield Path(directory)


@pytest.fixture
def scripted(directory: Path) -> Iterator[BackendProcess]:
    card = {"model_dir": str(directory), "vocab_size": VOCAB_SIZE}
    with BackendProcess(directory / "b.sock", next_token="echoed", step_s=0.002, **card) as process:
        yield process


@pytest.fixture
def start(directory: Path) -> Iterator[Callable[..., Frontend]]:
    with contextlib.ExitStack() as stack:

        def start(*options: str, max_fds: int | None = None) -> Frontend:
            frontend = Frontend(directory / "b.sock", *options, max_fds=max_fds)
            stack.callback(frontend.end)
            stack.callback(frontend.process.kill)
            stack.callback(frontend.client.close)
            return frontend

        yield start


def test_workers_share_the_port_and_a_killed_one_is_replaced(
    scripted: BackendProcess, start: Callable[..., Frontend]
) -> None:
    frontend = start("--workers", "2")
    frontend.wait_for("serving scripted")
    frontend.wait_for("serving scripted")
    first, second = frontend.workers()
    assert frontend.client.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == "the cat"
    first.send_signal(signal.SIGSTOP)
    assert httpx.post(frontend.client.base_url.join("/v1/completions"), json=BODY).status_code == 200
    first.kill()
    frontend.wait_for("died by SIGKILL; restarting")
    frontend.wait_for("serving scripted")
    replaced = frontend.workers()
    assert second in replaced
    assert len(replaced) == 2
    assert first not in replaced
    frontend.process.terminate()
    assert frontend.end() == 0


def test_restarted_worker_refuses_no_request_while_the_backend_runs(
    scripted: BackendProcess, start: Callable[..., Frontend]
) -> None:
    frontend = start()
    frontend.wait_for("serving scripted")
    for _ in range(3):
        (worker,) = frontend.workers()
        worker.kill()
        worker.wait()
        # It waits in the listening socket until the new worker accepts it.
        answer = httpx.post(frontend.client.base_url.join("/v1/completions"), json=BODY, timeout=30)
        assert answer.status_code == 200


def test_worker_imports_no_heavy_module(scripted: BackendProcess, start: Callable[..., Frontend]) -> None:
    frontend = start()
    frontend.wait_for("serving scripted")
    assert frontend.client.post("/v1/completions", json=BODY).status_code == 200
    (worker,) = frontend.workers()
    assert worker.memory_info().rss < 80e6
    mapped = Path(f"/proc/{worker.pid}/maps").read_text()
    assert not re.search(r"/(torch|numpy|cupy|transformers)/", mapped)


def test_sigterm_lets_streams_finish_and_refuses_new_requests(
    scripted: BackendProcess, start: Callable[..., Frontend]
) -> None:
    frontend = start()
    frontend.wait_for("serving scripted")
    body = {**BODY, "max_tokens": 300, "stream": True}
    with frontend.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        frontend.process.terminate()
        frontend.wait_until_closed()
        events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert frontend.end() == 0


def test_second_sigterm_ends_streams_with_an_error_event(
    scripted: BackendProcess, start: Callable[..., Frontend]
) -> None:
    frontend = start()
    frontend.wait_for("serving scripted")
    body = {**BODY, "max_tokens": 30_000, "stream": True}
    with frontend.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        frontend.process.terminate()
        frontend.wait_until_closed()
        frontend.process.terminate()
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
    assert frontend.end() == 0


def test_idle_connections_are_closed_when_file_descriptors_run_out(
    scripted: BackendProcess, start: Callable[..., Frontend]
) -> None:
    frontend = start(max_fds=64)
    frontend.wait_for("serving scripted")
    address = (frontend.client.base_url.host, frontend.client.base_url.port)
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(address))
        frontend.wait_for(r"\d+ connections, the limit of this worker")
        answers = []
        while not answers or answers[-1] != 200:
            answers.append(httpx.post(frontend.client.base_url.join("/v1/completions"), json=BODY).status_code)
        assert set(answers) <= {200, 429}


@pytest.mark.parametrize(("soft", "hard", "allowed"), [(64, 256, 160), (128, 128, 32), (20, 20, 1), (64, 16384, 8192)])
def test_worker_raises_its_file_descriptor_limit_to_the_hard_limit(soft: int, hard: int, allowed: int) -> None:
    code = "import resource as r; from penstock.frontend.transport.serving.connections import raise_fd_limit as f"
    code += "; print(f(), *r.getrlimit(r.RLIMIT_NOFILE))"
    limited = f'ulimit -Sn {soft} && ulimit -Hn {hard} && exec "$@"'
    argv = ["sh", "-c", limited, "sh", sys.executable, "-c", code]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split() == [str(allowed), str(hard), str(hard)]


def test_frontend_is_healthy_without_a_backend_and_ready_with_one(
    directory: Path, start: Callable[..., Frontend]
) -> None:
    frontend = start("--hold-timeout-s", "0.5")
    assert frontend.client.get("/health").status_code == 200
    assert frontend.client.get("/ready").status_code == 503
    refused = frontend.client.post("/v1/completions", json=BODY)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    with BackendProcess(directory / "b.sock", next_token="echoed", model_dir=str(directory), vocab_size=VOCAB_SIZE):
        frontend.wait_for("serving scripted")
        assert frontend.client.get("/ready").status_code == 200


def test_killed_backend_only_pauses_the_stream(scripted: BackendProcess, start: Callable[..., Frontend]) -> None:
    frontend = start()
    frontend.wait_for("serving scripted")
    body = {**BODY, "max_tokens": 400, "stream": True}
    expected = frontend.client.post("/v1/completions", json={**body, "stream": False}).json()["choices"][0]["text"]
    with frontend.client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        text = json.loads(next(lines).removeprefix("data: "))["choices"][0]["text"]
        scripted.restart()
        for line in lines:
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    assert text == expected


def run_to_its_end(directory: Path, *options: str) -> tuple[int, str]:
    argv = [sys.executable, "-P", "-m", "penstock.frontend.main", *options]
    environment = {**os.environ, "PENSTOCK_SOCKET": str(directory / "b.sock")}
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False, env=environment)
    return ended.returncode, ended.stderr + ended.stdout


def test_busy_port_is_reported_in_one_line_with_status_1(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        status, output = run_to_its_end(directory, "--port", str(port))
    assert (status, output) == (1, f"frontend: port {port} on 127.0.0.1 is in use\n")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--host", "no.such.host.invalid"), "no.such.host.invalid"),
        (("--port", "70000"), "port"),
        (("--port", "x"), "port"),
        (("--workers", "0"), "workers"),
        (("--workers", "100000"), "Must be <= 256"),
        (("--max-body", "lots"), "lots"),
        (("--drain-timeout-s", "-1"), "drain-timeout-s"),
        (("--no-such-option",), "no-such-option"),
        (("--socket", "/tmp/" + "x" * 200), "the limit is 107"),  # noqa: S108 - never made
        (("--replica-dir", "/tmp/" + "x" * 200), "--replica-dir /tmp/"),  # noqa: S108 - never made
        (("--replica-dir", "/dev/null"), "--replica-dir /dev/null/backend.sock cannot be used: Not a directory"),
        (("--replica-dir", "/x", "--replica-socket", "/y/z"), "--replica-socket and --replica-dir exclude each other"),
        (("--api-key", ""), "api-key"),
        (("--empty-api-key",), "empty-api-key"),
        (("--listen-fd", "0"), "--listen-fd 0"),
    ],
)
def test_invalid_option_is_named(
    directory: Path,
    options: tuple[str, ...],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PENSTOCK_SOCKET", str(directory / "b.sock"))
    with socket.create_server(("127.0.0.1", 0)) as busy:  # options are refused before the port is tried
        port = () if "--port" in options else ("--port", str(busy.getsockname()[1]))
        with pytest.raises(SystemExit) as exited:
            app([*port, *options])
    assert exited.value.code not in (0, None)
    printed = capsys.readouterr()
    assert named in f"{exited.value.code}{printed.out}{printed.err}"


def test_keys_come_from_the_environment_and_stay_off_the_command_line(
    scripted: BackendProcess, start: Callable[..., Frontend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "key-one,key-two")
    frontend = start()
    frontend.wait_for("serving scripted")
    for key, status in (("key-one", 200), ("key-two", 200), ("key-one,key-two", 401)):
        headers = {"authorization": f"Bearer {key}"}
        assert frontend.client.get("/v1/models", headers=headers).status_code == status
    for process in (frontend.process.pid, *(worker.pid for worker in frontend.workers())):
        assert b"key-one" not in Path(f"/proc/{process}/cmdline").read_bytes()


def test_workers_end_when_their_parent_is_killed(start: Callable[..., Frontend]) -> None:
    frontend = start("--workers", "2")
    frontend.client.get("/health")
    frontend.process.kill()
    # The pipe ends when the last process that holds its write end has ended; the workers hold it too.
    assert frontend.end() == -signal.SIGKILL


def test_backends_of_a_directory_come_and_go_while_the_server_answers(
    directory: Path, scripted: BackendProcess, start: Callable[..., Frontend]
) -> None:
    frontend = start("--replica-dir", str(directory), "--workers", "2")
    for _ in range(2):
        frontend.wait_for("serving scripted")
    card = {"model_dir": str(directory), "vocab_size": VOCAB_SIZE}
    with BackendProcess(directory / "c.sock", next_token="echoed", step_s=0.002, **card):
        for _ in range(2):
            frontend.wait_for("replica c is taken up")
        (directory / "b.sock").unlink()
        for _ in range(2):
            frontend.wait_for("replica b is dropped")
        answer = frontend.client.post("/v1/completions", json=BODY)
        assert answer.json()["choices"][0]["text"] == "the cat"
        page = frontend.client.get("/metrics").text
        assert 'penstock_backend_up{model="scripted",replica="c"} 1' in page
        assert 'replica="b"' not in page


def test_every_worker_reports_the_whole_systems_metrics(
    scripted: BackendProcess, start: Callable[..., Frontend]
) -> None:
    frontend = start("--workers", "2")
    for _ in range(2):
        frontend.wait_for("serving scripted")
    for _ in range(6):
        assert httpx.post(frontend.client.base_url.join("/v1/completions"), json=BODY).status_code == 200

    def scrape() -> tuple[str, dict[str, float]]:
        page = httpx.get(frontend.client.base_url.join("/metrics")).text
        worker = re.findall(r'worker="(\d+)"', page)[0]
        return worker, {name: float(value) for name, value in re.findall(r"^(penstock_\S+) (\S+)$", page, re.MULTILINE)}

    pages: dict[str, dict[str, float]] = {}
    # The backend sums the boards four times a second. A new connection each time, so that either worker may answer.
    while len(pages) < 2 or any(page['penstock_streams_total{outcome="length"}'] < 6 for page in pages.values()):
        worker, page = scrape()
        pages[worker] = page
    for page in pages.values():
        assert page["penstock_frontends"] == 2
        assert page["penstock_tokens_streamed_total"] == 12
        assert page["penstock_time_to_first_token_seconds_count"] == 6
        assert page["penstock_inter_token_latency_seconds_count"] == 6
        assert page["penstock_e2e_request_latency_seconds_count"] == 6
    own = [page[f'penstock_worker_tokens_streamed_total{{worker="{worker}"}}'] for worker, page in pages.items()]
    assert sum(own) == 12


@pytest.mark.parametrize(
    ("module", "needless"), [("main", {"asyncio", "penstock.shm.client"}), ("worker", {"cyclopts", "rich"})]
)
def test_parent_and_worker_import_only_what_they_run(module: str, needless: set[str]) -> None:
    code = f"import sys, penstock.frontend.{module}; print({needless} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_strict_refuses_unknown_fields(scripted: BackendProcess, start: Callable[..., Frontend]) -> None:
    frontend = start("--strict", "--log-level", "debug")
    frontend.wait_for("serving scripted")
    refused = frontend.client.post("/v1/completions", json={**BODY, "temprature": 0.5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temprature")
    assert frontend.client.post("/v1/completions", json=BODY).status_code == 200
