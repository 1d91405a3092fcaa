"""SIGTERM as an exception."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from types import FrameType


def exit_on_sigterm() -> None:
    """Let SIGTERM raise SystemExit, so that a command stops what it started and removes its temporary files."""
    signal.signal(signal.SIGTERM, _exit)


def _exit(number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
