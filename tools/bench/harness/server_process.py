"""A server of any kind as a child process: its log, its pauses and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from penstock.process.children import stop_with_parent
from penstock.tools.bench.errors import BenchError
from penstock.tools.bench.harness.processes import pause_tree, resume_tree

START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class ServerProcess:
    name: str
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    """Standard output and standard error of all processes of the server."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def check_alive(self, when: str) -> None:
        """Raises BenchError with the last lines of the log."""
        if self.process.poll() is not None:
            raise BenchError(f"{self.name} ended with status {self.process.returncode} {when}\n{self.log_tail()}")

    def log_text(self) -> str:
        # pread: server and benchmark share the file position, and the server writes there.
        return os.pread(self.log.fileno(), os.fstat(self.log.fileno()).st_size, 0).decode(errors="replace")

    def log_tail(self) -> str:
        return "\n".join(self.log_text().splitlines()[-12:])

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The server uses no CPU while the context lasts, except in `running` contexts. Its memory stays."""
        self._pause()
        try:
            yield
        finally:
            self._resume()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Within `paused`: the server runs while the context lasts. Raises BenchError if it has ended at exit."""
        self._resume()
        try:
            yield
            self.check_alive("during the run")
        finally:
            self._pause()

    def _pause(self) -> None:
        if self.process.poll() is None:  # else the pid may be another process's by now
            pause_tree(self.pid)

    def _resume(self) -> None:
        if self.process.poll() is None:
            resume_tree(self.pid)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # children that it left behind


@contextlib.contextmanager
def server_process(name: str, argv: Sequence[str], environment: Mapping[str, str]) -> Iterator[ServerProcess]:
    """Run a server while the context lasts. It ends with the benchmark, even if that is killed.

    Raises BenchError if the server ends by itself.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            # A group of its own: Ctrl-C reaches it through us, once. But in our session: if we are killed while it is
            # paused, the kernel resumes it, because its group is then an orphaned one, and SIGTERM ends it.
            process_group=0,
            preexec_fn=stop_with_parent,
        )
        server = ServerProcess(name, process, log)
        try:
            yield server
            server.check_alive("during the run")
        finally:
            server.stop()
