"""The proxy in front of the servers: its configuration is made from a template, checked, and reloaded without loss."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jinja2

from penstock.process.children import find_program
from penstock.process.private_directory import Trust, UnsafeDirectory, check_directory
from penstock.serve.fleet.cluster import Server, as_targets

RouterKind = Literal["haproxy", "nginx"]
FILES: dict[RouterKind, str] = {"haproxy": "haproxy.cfg", "nginx": "nginx.conf"}
TARGETS = "servers.json"
TEMPLATES = Path(__file__).parent / "templates"
BEGINNING = r'"(?:content|prompt|input|instructions|system|query|inputs|text)" *: *(?:"|\[)'
"""Text before a prompt's first character, in the body of every endpoint that has a prompt."""
NUM_BEGINNING_BYTES = 1024
"""About 256 tokens. Requests whose prompts agree this far go to one server."""
BALANCE_FACTOR_PERCENT = 150
SLACK_REQUESTS = 32
"""Open requests that no bound limits."""
_COMMAND_TIMEOUT_S = 30.0
_ASK_EVERY_S = 0.05
_SIGNAL_AGAIN_S = 1.0
_MAX_LOOKS, _LOOK_AGAIN_S = 20, 0.005
_GENERATION_BYTES = 8


class RouterError(Exception):
    """The router failed. The message is one line for the operator."""


@dataclass(frozen=True, slots=True)
class RouterSettings:
    kind: RouterKind
    directory: Path
    """Directory of the written files: the configuration, the list of servers, and the proxy's own files."""
    listen: str
    """HOST:PORT where clients connect."""
    template: Path | None = None
    """Replaces the shipped template."""
    reload_command: str | None = None
    """Runs after each change, for a proxy that somebody else runs.

    Without it the proxy is started here as a daemon.
    """


def render(settings: RouterSettings, servers: Sequence[Server], generation: str) -> str:
    """Return the proxy's configuration; generation identifies it. Raises RouterError for a wrong template."""
    path = settings.template or TEMPLATES / FILES[settings.kind]
    try:
        environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)  # noqa: S701 - no HTML
        return environment.from_string(path.read_text(encoding="utf-8")).render(
            servers=sorted(servers),
            listen=settings.listen,
            directory=settings.directory,
            generation=generation,
            beginning=BEGINNING,
            num_bytes=NUM_BEGINNING_BYTES,
            balance_factor=BALANCE_FACTOR_PERCENT,
            slack=SLACK_REQUESTS,
        )
    except (OSError, UnicodeDecodeError, jinja2.TemplateError) as error:
        raise RouterError(f"the template {path}: {error}") from error


class Router:
    """One proxy. It outlives this process: the next `penstock ray up` finds it by its pid file."""

    def __init__(self, settings: RouterSettings) -> None:
        """Raises RouterError."""
        self._settings = settings
        self._directory = settings.directory
        self._path = settings.directory / FILES[settings.kind]
        program = find_program(settings.kind)
        if program is None:
            raise RouterError(f"{settings.kind} is not installed; on Debian: apt-get install haproxy nginx-light")
        self._program = program
        try:
            check_directory(settings.directory, Trust.READABLE)
        except (OSError, UnsafeDirectory) as error:
            raise RouterError(str(error)) from error

    def apply(self, servers: Sequence[Server]) -> None:
        """Route to these servers from now on. Open streams continue.

        Raises RouterError; then the proxy keeps its configuration, or does not run.
        """
        generation = secrets.token_hex(_GENERATION_BYTES)
        configuration = render(self._settings, servers, generation).encode()
        try:
            draft = self._path.with_suffix(".new")
            draft.write_bytes(configuration)
            self._run(self._check_argv(draft), f"{self._settings.kind} refuses {draft}")
            draft.replace(self._path)
            targets = self._directory / TARGETS
            (draft := targets.with_suffix(".new")).write_bytes(as_targets(servers))
            draft.replace(targets)
        except OSError as error:
            raise RouterError(f"the router's files cannot be written: {error}") from error
        if self._settings.reload_command is not None:
            self._run(shlex.split(self._settings.reload_command), "the command of --router-reload failed")
        elif self.pid is None:
            self._start(generation)
        elif self._settings.kind == "haproxy":
            self._signal_until(signal.SIGUSR2, lambda: self._generation() == generation)
        else:
            self._signal_until(signal.SIGHUP, lambda: True)  # nginx loses no signal

    @property
    def pid(self) -> int | None:
        """The proxy's main process, if it runs with our configuration."""
        for _ in range(_MAX_LOOKS):
            try:
                written = (self._directory / f"{self._settings.kind}.pid").read_text().strip()
                words = Path("/proc", written, "cmdline").read_bytes() if written.isdigit() else b""
            except OSError:
                return None
            if words:
                return int(written) if os.fsencode(self._path) in words else None
            time.sleep(_LOOK_AGAIN_S)  # HAProxy executes itself again: both are empty for a moment
        return None

    def _start(self, generation: str) -> None:
        """Return once it takes signals: the command returns sooner."""
        self._run(self._start_argv(), f"{self._settings.kind} does not start")
        deadline_s = time.monotonic() + _COMMAND_TIMEOUT_S
        while self.pid is None or (self._settings.kind == "haproxy" and self._generation() != generation):
            if time.monotonic() > deadline_s:
                raise RouterError(f"{self._settings.kind} has not started within {_COMMAND_TIMEOUT_S:.0f} s")
            time.sleep(_ASK_EVERY_S)

    def stop(self) -> None:
        """Accept nothing new, and end with the last stream. Raises RouterError."""
        if self._settings.kind == "haproxy":
            self._signal_until(signal.SIGUSR1, lambda: self._generation() is None)
        else:
            self._signal_until(signal.SIGQUIT, lambda: True)

    def _signal_until(self, number: signal.Signals, is_done: Callable[[], bool]) -> None:
        """Send a signal until is_done. HAProxy's main process loses signals while it executes itself again."""
        deadline_s = time.monotonic() + _COMMAND_TIMEOUT_S
        while (pid := self.pid) is not None:
            with suppress(ProcessLookupError):  # it has ended since
                os.kill(pid, number)
            again_s = time.monotonic() + _SIGNAL_AGAIN_S
            while time.monotonic() < again_s:
                if is_done():
                    return
                time.sleep(_ASK_EVERY_S)
            if time.monotonic() > deadline_s:
                raise RouterError(f"{self._settings.kind} (process {pid}) ignores {number.name}")
        if number == signal.SIGUSR2:
            raise RouterError("haproxy ended when it read its configuration again")

    def _generation(self) -> str | None:
        """The generation of the HAProxy process that accepts connections now; None without one."""
        with socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(_SIGNAL_AGAIN_S)
            try:
                asking.connect(str(self._directory / "haproxy.sock"))
                asking.sendall(b"show info\n")
                answer = b"".join(iter(lambda: asking.recv(1 << 16), b"")).decode()
            except OSError:
                return None
        lines = (line.partition(": ") for line in answer.splitlines())
        return next((value for name, _, value in lines if name == "description"), "")

    def _check_argv(self, draft: Path) -> list[str]:
        if self._settings.kind == "haproxy":
            return [self._program, "-c", "-f", str(draft)]
        return [*self._nginx(draft), "-t", "-q"]

    def _start_argv(self) -> list[str]:
        if self._settings.kind == "haproxy":
            pid_file = str(self._directory / "haproxy.pid")
            return [self._program, "-W", "-D", "-p", pid_file, "-f", str(self._path)]
        return self._nginx(self._path)

    def _nginx(self, path: Path) -> list[str]:
        return [self._program, "-e", "stderr", "-p", str(self._directory), "-c", str(path)]

    def _run(self, argv: list[str], failed: str) -> None:
        """Run a command. Output goes to a file: a daemon keeps it open."""
        log = self._directory / f"{self._settings.kind}.log"
        try:
            begin = log.stat().st_size if log.exists() else 0
            with log.open("ab") as output:
                status = subprocess.run(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    check=False,
                    timeout=_COMMAND_TIMEOUT_S,
                ).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RouterError(f"{failed}: {error}") from error
        if status != 0:
            with log.open("rb") as output:
                output.seek(begin)
                said = " ".join(output.read().decode(errors="replace").split())
            raise RouterError(f"{failed}: status {status}: {said[-500:]}")
