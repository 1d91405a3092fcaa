"""The server under test: `penstock serve`, started for one run and stopped after it."""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.backend.model_names import DEMO_MODEL
from penstock.process.children import module_argv
from penstock.process.options import to_argv
from penstock.serve.command import split_keys
from penstock.serve.options import ServeOptions
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.server_process import START_TIMEOUT_S, ServerProcess, server_process
from penstock.tools.bench.load_generator.target import ServerAddress
from penstock.tools.processes import descendants, module_of

_READY = re.compile(r"^Ready: (http://\S+)/v1$", re.MULTILINE)


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
        model, socket = options.model or DEMO_MODEL, Path(directory) / "backend.sock"
        options = replace(options, model=model, host="127.0.0.1", port=0, socket=socket)
        public_options, environment = split_keys(options)
        argv = module_argv("penstock.main", ["serve", *to_argv(public_options)])
        with server_process("the server", argv, environment) as process:
            address = ServerAddress(_wait_until_ready(process), first_api_key(options))
            yield BenchServer(address, process, options.socket)


def _wait_until_ready(server: ServerProcess) -> str:
    """Return the address that the server logs. Raises BenchError."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while (ready := _READY.search(server.log_text())) is None:
        server.check_alive("before it was ready")
        if time.monotonic() > deadline_s:
            raise BenchError(f"{server.name} was not ready in {START_TIMEOUT_S:g} s\n{server.log_tail()}")
        time.sleep(0.05)
    return ready[1]
