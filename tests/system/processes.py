"""Starts and kills the real processes, and reads their log lines."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from penstock.process.children import module_argv

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[2]
START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 45.0


class Command:
    """A child process; a thread reads its output."""

    def __init__(
        self,
        module: str | Path,
        *arguments: str,
        python_path: str = str(REPOSITORY),
        cwd: Path | None = None,
        max_fds: int | None = None,
    ) -> None:
        """module is one of ours, or the path of a program. max_fds is the hard limit of file descriptors."""
        argv = module_argv(module, arguments) if isinstance(module, str) else (str(module), *arguments)
        self._lines: list[str] = []
        self._news = threading.Condition()
        self.process = subprocess.Popen(
            [*([] if max_fds is None else ["prlimit", f"--nofile={max_fds}"]), *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": python_path},
            cwd=cwd,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self._lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    @property
    def output(self) -> str:
        return "\n".join(self._lines)

    def wait_for(self, pattern: str, timeout_s: float = START_TIMEOUT_S, *, count: int = 1) -> re.Match[str]:
        """Wait for the count-th line that contains the pattern."""

        def found() -> re.Match[str] | None:
            matches = [match for line in self._lines if (match := re.search(pattern, line))]
            return matches[count - 1] if len(matches) >= count else None

        with self._news:
            self._news.wait_for(lambda: found() or not self._reader.is_alive(), timeout_s)
            match = found()
        assert match is not None, f"no line with {pattern!r} in:\n{self.output}"
        return match

    def status(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait for the end of the process and of its output; return the exit status."""
        returncode = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return returncode

    def terminate(self) -> int:
        self.process.terminate()
        return self.status()

    def kill(self) -> None:
        """Send SIGKILL to the process and all its descendants."""
        for pid in [*descendants(self.process.pid), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        self._reader.join(STOP_TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # the process or one of its threads has ended
        for children in Path(f"/proc/{pid}/task").glob("*/children"):  # any thread may have started one
            found += map(int, children.read_text().split())
    return [pid for child in found for pid in (child, *descendants(child))]


def backends_of(serve: Command) -> list[int]:
    pids = descendants(serve.process.pid)
    return [pid for pid in pids if b"penstock.backend.main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


class Frontend(Command):
    """`frontend` on a free port."""

    def __init__(self, socket: Path, *arguments: str, max_fds: int | None = None) -> None:
        module = "penstock.frontend.main"
        super().__init__(module, "--port", "0", "--socket", str(socket), *arguments, max_fds=max_fds)
        self.url = self.wait_for(r"listening on (http://\S+)").group(1)

    def get(self, path: str) -> httpx.Response:
        # Without verify=False each call reads all of the system's certificates, even for plain HTTP.
        return httpx.get(f"{self.url}{path}", timeout=20.0, verify=False)  # noqa: S501

    def ready(self) -> dict[str, Any] | None:
        """The body of /ready if it is green, else None."""
        response = self.get("/ready")
        body: dict[str, Any] = response.json()
        return body if response.status_code == 200 else None

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        wait_until(lambda: self.ready() is not None, timeout_s)

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        """Wait until the backend runs nothing and holds no page."""

        def is_idle() -> bool:
            body = self.ready()
            return body is not None and body["running"] == body["waiting"] == body["pages_used"] == 0

        wait_until(is_idle, timeout_s)


def wait_until(condition: Any, timeout_s: float) -> None:
    """Poll until the condition holds: another process's state sends no event."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"the condition did not hold within {timeout_s} s"
        time.sleep(0.05)


@contextmanager
def running(*commands: Command) -> Iterator[None]:
    """End the commands at the end of the block, in the order given."""
    try:
        yield
    finally:
        for command in commands:
            command.close()


def start_backend(socket: Path, *arguments: str) -> Command:
    """A backend that is ready."""
    backend = Command("penstock.backend.main", "--socket", str(socket), *arguments)
    try:
        backend.wait_for(r"ready: ")
    except AssertionError:
        backend.close()
        raise
    return backend
