"""A server of any kind as a child process of the benchmark."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

from penstock.tools.bench.errors import BenchError
from penstock.tools.processes import Child

START_TIMEOUT_S = 600.0


class ServerProcess(Child):
    """Its methods raise BenchError, with the last lines of the log."""

    failure = BenchError

    @classmethod
    @contextlib.contextmanager
    def run(
        cls, name: str, argv: Sequence[str], environment: Mapping[str, str], *, answers: bool = False
    ) -> Iterator[Self]:
        """A server that runs while the context lasts. It ends with the benchmark, even if that is killed.

        Raises BenchError if it cannot be started, or ends by itself.
        """
        with tempfile.TemporaryFile() as log:
            try:
                server = cls(name, argv, environment, log, answers=answers)
            except OSError as error:
                raise BenchError(f"{argv[0]} cannot be started: {error.strerror}") from None
            try:
                yield server
                server.check_alive("during the run")
            finally:
                server.stop()
                server.kill_rest()


server_process = ServerProcess.run
