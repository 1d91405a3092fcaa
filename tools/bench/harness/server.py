"""The server under test: `penstock serve`, started for one run and stopped after it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from penstock.shm.process.options import to_argv
from penstock.shm.process.supervisor import module_argv
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.processes import descendants, runs_module, stop_with_parent
from penstock.tools.bench.load_generator.target import ServerAddress
from penstock.tools.serve import ServeOptions, split_keys

_READY = re.compile(r"^Ready: (http://\S+)/v1$", re.MULTILINE)
_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class BenchServer:
    address: ServerAddress
    pid: int
    """Process id of `penstock serve`."""
    socket: Path
    """Unix socket of its backend."""

    def backend_pid(self) -> int:
        return self._pid_of("penstock.backend.main")

    def frontend_pids(self) -> list[int]:
        """The supervisor of the workers first, then the workers."""
        first = self._pid_of("penstock.frontend.main")
        return [first, *descendants(first)]

    def _pid_of(self, module: str) -> int:
        for pid in descendants(self.pid):
            if runs_module(pid, module):
                return pid
        raise BenchError(f"the server has no process of {module}")


def first_api_key(options: ServeOptions) -> str | None:
    return options.api_key[0] if options.api_key else None


@contextlib.contextmanager
def bench_server(options: ServeOptions) -> Iterator[BenchServer]:
    """Run `penstock serve` on a free port and a socket of its own while the context lasts. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as directory, tempfile.TemporaryFile() as log:
        options = replace(options, host="127.0.0.1", port=0, socket=Path(directory) / "backend.sock")
        public_options, environment = split_keys(options)
        process = subprocess.Popen(
            module_argv("penstock.tools.main", ["serve", *to_argv(public_options)]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            process_group=0,  # Ctrl-C reaches it through us, once
            preexec_fn=stop_with_parent,
        )
        try:
            address = ServerAddress(_wait_until_ready(process, log), first_api_key(options))
            yield BenchServer(address, process.pid, options.socket)
            if process.poll() is not None:
                raise BenchError(f"the server ended with status {process.returncode} during the run\n{_tail(log)}")
        finally:
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    """Return the address that the server prints. Raises BenchError."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while (ready := _READY.search(_text(log))) is None:
        if process.poll() is not None:
            raise BenchError(f"the server did not start, status {process.returncode}\n{_tail(log)}")
        if time.monotonic() > deadline_s:
            raise BenchError(f"the server was not ready in {_START_TIMEOUT_S:g} s\n{_tail(log)}")
        time.sleep(0.05)
    return ready[1]


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its children end with it
        process.wait()


def _text(log: IO[bytes]) -> str:
    # pread: server and benchmark share the file position, and the server writes there.
    return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")


def _tail(log: IO[bytes]) -> str:
    return "\n".join(_text(log).splitlines()[-12:])
