"""Children of this process: they end with it; the programs and the entries of /proc that describe them; a process that
waits, with its imports done, to take the place of one that has ended.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_SYSTEM_FOLDERS = ":/usr/sbin:/usr/local/sbin"
"""Folders where Debian has proxies and a user's PATH does not look."""


def module_argv(module: str, arguments: Sequence[str] = ()) -> tuple[str, ...]:
    """The command line of one of our modules. With -P Python imports nothing from the working directory."""
    return (sys.executable, "-P", "-m", module, *arguments)


def find_program(name: str) -> str | None:
    """Return the path of an installed program."""
    return shutil.which(name, path=os.environ.get("PATH", "") + _SYSTEM_FOLDERS)


def stop_with_parent(number: signal.Signals = signal.SIGTERM, parent_pid: int | None = None) -> None:
    """Call it in a child as it starts: the child then gets this signal when its parent ends.

    A parent that ends before this call sends no signal. If parent_pid is given and is no longer the parent, the child
    ends at once.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)
    if parent_pid not in (None, os.getppid()):
        os._exit(1)


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on. Raises ProcessLookupError."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    # The command's name, in parentheses, may contain anything. The state follows the last parenthesis.
    return stat.rpartition(")")[2].split()


_GO = b"\1"
_AGAIN_AFTER_S = 60.0


@dataclass(slots=True)
class Standby:
    """The standby process of one child, if there is one. Only the supervisor's thread uses it."""

    process: subprocess.Popen[bytes] | None = None
    _gate: int = -1
    _not_before_s: float = 0.0

    def start(self, spawn: Callable[[int], subprocess.Popen[bytes]], now_s: float) -> None:
        """Start a standby if there is none.

        spawn starts the process, which may continue once it reads a byte from the fd. Raises OSError. After a failure,
        or after a standby that ended by itself, the next attempt comes a minute later.
        """
        if self.process is not None and self.process.poll() is None:
            return
        if self.process is not None:
            self.drop()
            self._not_before_s = now_s + _AGAIN_AFTER_S
        if now_s < self._not_before_s:
            return
        self._not_before_s = now_s + _AGAIN_AFTER_S
        turn, self._gate = os.pipe()
        try:
            self.process = spawn(turn)
        except BaseException:
            os.close(self._gate)
            raise
        finally:
            os.close(turn)
        self._not_before_s = 0.0

    def take(self) -> subprocess.Popen[bytes] | None:
        """Let the standby continue and return it; None if there is none."""
        process = self.process
        if process is None or process.poll() is not None:
            return None
        self.process = None
        try:
            os.write(self._gate, _GO)
        except BrokenPipeError:  # it has just ended
            process.wait()
            return None
        finally:
            os.close(self._gate)
        return process

    def drop(self) -> None:
        """End the standby."""
        if self.process is not None:
            os.close(self._gate)
            self.process.kill()
            self.process.wait()
            self.process = None


def wait_for_turn(fd: int) -> bool:
    """Block until this process may continue. False if it is no longer needed. Closes the fd."""
    turn = os.read(fd, 1)  # Python repeats it after a signal whose handler returns
    os.close(fd)
    return turn == _GO
