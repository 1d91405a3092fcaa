"""The server under test: `penstock serve`, or a frontend alone, started for one run and stopped after it."""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.frontend.options import FrontendOptions
from penstock.process.options import to_argv
from penstock.process.supervisor import module_argv
from penstock.serve.command import split_keys
from penstock.serve.options import ServeOptions, select_options
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.server_process import START_TIMEOUT_S, ServerProcess, server_process
from penstock.tools.bench.load_generator.target import ServerAddress
from penstock.tools.processes import descendants, module_of

_READY = re.compile(r"^Ready: (http://\S+)/v1$", re.MULTILINE)
_FRONTEND_READY = re.compile(r"listening on (http://\S+) .*: serving ", re.DOTALL)
"""A frontend has its address first, and the model when it has found its backend."""


@dataclass(frozen=True, slots=True)
class BenchServer:
    address: ServerAddress
    process: ServerProcess
    """`penstock serve`, the parent of all others."""
    socket: Path
    """Unix socket of its backend."""

    def backend_pid(self) -> int:
        return self._pid_of("penstock.backend.main")

    def frontend_pids(self) -> list[int]:
        """The supervisor of the workers first, then the workers."""
        first = self._pid_of("penstock.frontend.main")
        return [first, *descendants(first)]

    def _pid_of(self, module: str) -> int:
        for pid in descendants(self.process.pid):
            if module_of(pid) == module:
                return pid
        raise BenchError(f"the server has no process of {module}")


def first_api_key(options: ServeOptions) -> str | None:
    return options.api_key[0] if options.api_key else None


@contextlib.contextmanager
def bench_server(options: ServeOptions) -> Iterator[BenchServer]:
    """Run `penstock serve` on a free port and a socket of its own while the context lasts. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory:
        options = replace(options, host="127.0.0.1", port=0, socket=Path(directory) / "backend.sock")
        public_options, environment = split_keys(options)
        argv = module_argv("penstock.main", ["serve", *to_argv(public_options)])
        with server_process("the server", argv, environment) as process:
            address = ServerAddress(_wait_until_ready(process, _READY), first_api_key(options))
            yield BenchServer(address, process, options.socket)


@contextlib.contextmanager
def bench_frontend(options: ServeOptions, backend: ServerProcess) -> Iterator[ServerAddress]:
    """Run only the frontend, on a free port, while the context lasts. The backend is, or will be, at options.socket.

    Raises BenchError.
    """
    options = replace(options, host="127.0.0.1", port=0, log_level="info", log_json=False)
    public_options, environment = split_keys(options)
    argv = module_argv("penstock.frontend.main", to_argv(select_options(public_options, FrontendOptions)))
    with server_process("the frontend", argv, environment) as process:
        yield ServerAddress(_wait_until_ready(process, _FRONTEND_READY, backend), first_api_key(options))


def _wait_until_ready(server: ServerProcess, pattern: re.Pattern[str], *others: ServerProcess) -> str:
    """Return the address that the server logs. Raises BenchError, also if one of the others ends."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while (ready := pattern.search(server.log_text())) is None:
        for process in (server, *others):
            process.check_alive("before it was ready")
        if time.monotonic() > deadline_s:
            raise BenchError(f"{server.name} was not ready in {START_TIMEOUT_S:g} s\n{server.log_tail()}")
        time.sleep(0.05)
    return ready[1]
