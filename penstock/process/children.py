"""Children of this process: they end with it; the programs and the entries of /proc that describe them."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_SYSTEM_FOLDERS = ":/usr/sbin:/usr/local/sbin"
"""Folders where Debian has proxies and a user's PATH does not look."""


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
