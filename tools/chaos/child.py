"""A process that the run has started: the server, a frontend or a proxy."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.process.children import stop_with_parent
from penstock.tools.chaos.census import session_members
from penstock.tools.chaos.errors import ChaosError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_STOP_TIMEOUT_S = 60.0


class Child:
    """A process in a session of its own, so that all of its descendants can be found. It ends with this process."""

    def __init__(self, argv: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """log receives its output, after what is there."""
        self._log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
                preexec_fn=stop_with_parent,
            )
        self.pid = self.process.pid

    def check_alive(self) -> None:
        """Raises ChaosError with the end of the log if it has ended."""
        if self.process.poll() is not None:
            raise ChaosError(f"status {self.process.returncode} of {self.process.args!r}: {self.log()[-1500:]}")

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def terminate(self) -> int:
        """Return the exit status; that of SIGKILL if SIGTERM was not enough."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()

    def kill_session(self) -> list[int]:
        """Kill all remaining processes of the session, and return them."""
        left = [pid for pid in session_members(self.pid) if pid != self.pid]
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left
