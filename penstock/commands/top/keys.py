"""Single keys of a terminal, without echo and without Enter."""

from __future__ import annotations

import contextlib
import os
import select
import termios
import tty
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self


class Keys:
    """A context in which the terminal gives each key at once; Ctrl-C still interrupts."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._before = termios.tcgetattr(fd)

    def __enter__(self) -> Self:
        tty.setcbreak(self._fd, termios.TCSANOW)
        return self

    def __exit__(self, _type: type[BaseException] | None, _error: object, _traceback: TracebackType | None) -> None:
        with contextlib.suppress(termios.error):  # the terminal has gone
            termios.tcsetattr(self._fd, termios.TCSANOW, self._before)

    def wait(self, timeout_s: float) -> str | None:
        """Return what was typed, one key or several; None when the time is up. Raises EOFError if the terminal has
        gone."""
        readable, _, _ = select.select([self._fd], [], [], timeout_s)
        if not readable:
            return None
        try:
            data = os.read(self._fd, 64)
        except OSError as error:  # the other end of a pty has closed
            raise EOFError from error
        if not data:
            raise EOFError
        return data.decode("utf-8", "replace")
