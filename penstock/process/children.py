"""How child processes are found, and how they end with the process that started them."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from types import FrameType

_PR_SET_PDEATHSIG = 1
_SYSTEM_FOLDERS = ":/usr/sbin:/usr/local/sbin"
"""Folders where Debian has proxies and a user's PATH does not look."""


def find_program(name: str) -> str | None:
    """Return the path of an installed program."""
    return shutil.which(name, path=os.environ.get("PATH", "") + _SYSTEM_FOLDERS)


def stop_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Call it in a child as it starts: the child then gets this signal when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit, so that a command stops what it started and removes its temporary files."""
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
