"""`penstock top`: draws frames, reads keys, and cancels requests as the operator."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Self

import httpx2
import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from penstock.commands.top.frame import CANCEL_HELP, HELP, draw, num_lines_that_fit
from penstock.commands.top.snapshot import Line, Meter, Snapshot, Sort, describe, sorted_lines
from penstock.process.failure import fail
from penstock.process.options import from_environment
from penstock.shm.recording.live import LiveEngine
from penstock.shm.recording.rings import NoRing, open_ring

_TIMEOUT_S = 10.0
_MAX_MESSAGE = 200


@dataclass(frozen=True, slots=True)
class Operator:
    url: str
    """The server's address, without a path."""
    admin_key: str
    transport: httpx2.BaseTransport | None = None

    def cancel(self, line: Line) -> str:
        """Cancel the request of a line; return the result in one line."""
        if line.request is None:
            return "this sequence began before the recorder's first record, so its request is not known"
        frontend, request_id = line.request
        url = f"{self.url.rstrip('/')}/admin/requests/{frontend}.{request_id}/cancel"
        headers = {"authorization": f"Bearer {self.admin_key}"}
        try:
            with httpx2.Client(timeout=_TIMEOUT_S, transport=self.transport) as client:
                answer = client.post(url, headers=headers)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            return f"{line.name} is not cancelled: {error}"
        if answer.status_code == httpx2.codes.OK:
            return f"{line.name} is cancelled"
        return f"{line.name} is not cancelled: {_message(answer)}"


def _message(answer: httpx2.Response) -> str:
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server at this address answers {answer.status_code}; is it Penstock?"
    return " ".join(message.split())[:_MAX_MESSAGE]


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


_COMMAND = "penstock top"
_ONCE_LINES = 1000
_SORT_OF_KEY = {sort.value[0]: sort for sort in Sort}


def top(
    *,
    once: bool = False,
    json: bool = False,
    sort: Sort = Sort.AGE,
    pid: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    interval: Annotated[float, Parameter(validator=Number(gte=0.1, lte=60.0))] = 1.0,
    url: Annotated[str, from_environment("--url")] = "http://127.0.0.1:8000",
    admin_key: Annotated[str | None, Parameter(show_default=False), from_environment("--admin-key")] = None,
) -> None:
    """The command; its help is in `penstock.main`.

    Parameters
    ----------
    once
        Print one frame as text and end, for scripts and for terminals that cannot move the cursor.
    json
        Print one JSON object with the same contents and end.
    sort
        Sort requests so at first.
    pid
        Process id of the server or of its backend. Default: that of this user which has started last.
    interval
        Seconds between frames.
    url
        Where the server answers HTTP, to cancel requests.
    admin_key
        The server's --admin-key. Better set in the environment, which other users of the machine cannot read.
    """
    console = Console()
    if not (once or json) and not (console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty()):
        fail(_COMMAND, "this is no terminal that can be redrawn; give --once to print one frame")
    try:
        ring, _ = open_ring(pid, newest=True)
    except NoRing as error:
        fail(_COMMAND, str(error))
    try:
        meter = Meter(LiveEngine(ring))
        if json:
            sys.stdout.buffer.write(msgspec.json.encode(describe(meter.take(time.monotonic()), sort)) + b"\n")
        elif once:
            snapshot = meter.take(time.monotonic())
            console.print(draw(snapshot, sort, num_lines=_ONCE_LINES, notice=notice_of(snapshot)))
        else:
            operator = None if admin_key is None else Operator(url, admin_key)
            show(View(meter, sort, operator), console, sys.stdin.fileno(), interval)
    except ValueError as error:
        fail(_COMMAND, f"the flight recorder cannot be read: {error}")
    finally:
        ring.close()


class View:
    """The view, with the choices that keys have made. operator is None without an admin key."""

    def __init__(self, meter: Meter, sort: Sort, operator: Operator | None = None) -> None:
        """Raises ValueError for records that are damaged."""
        self._meter = meter
        self._sort = sort
        self._operator = operator
        self._is_paused = False
        self._chosen: str | None = None
        self._asked: Line | None = None
        """The line that y cancels."""
        self._said = ""
        self._snapshot = meter.take(time.monotonic())

    def refresh(self) -> None:
        """Raises ValueError for records that are damaged."""
        latest = self._meter.take(time.monotonic())
        if not self._is_paused:
            self._snapshot = latest

    def press(self, key: str) -> None:
        self._said = ""
        asked, self._asked = self._asked, None
        if asked is not None and self._operator is not None:
            self._said = self._operator.cancel(asked) if key == "y" else f"{asked.name} is not cancelled"
        elif key in ("j", "k"):
            self._choose(1 if key == "j" else -1)
        elif key == "c":
            self._ask()
        else:
            self._is_paused ^= key == " "
            self._sort = _SORT_OF_KEY.get(key, self._sort)

    def _lines(self) -> list[Line]:
        return sorted_lines(self._snapshot.lines, self._sort)

    def _choose(self, step: int) -> None:
        names = [line.name for line in self._lines()]
        place = names.index(self._chosen) + step if self._chosen in names else 0
        self._chosen = names[min(max(place, 0), len(names) - 1)] if names else None

    def _ask(self) -> None:
        if self._operator is None:
            self._said = "to cancel requests, give --admin-key or PENSTOCK_ADMIN_KEY"
            return
        self._asked = next((line for line in self._lines() if line.name == self._chosen), None)
        self._said = "choose a request first: j and k" if self._asked is None else f"cancel {self._chosen}? y or n"

    def screen(self, height: int) -> RenderableType:
        snapshot, num_lines = self._snapshot, num_lines_that_fit(height, self._snapshot)
        notice = self._said or notice_of(snapshot)
        state = f"sorted by {self._sort.value}{'   PAUSED' if self._is_paused else ''}"
        keys = HELP if self._operator is None else f"{HELP}   {CANCEL_HELP}"
        return Group(
            draw(snapshot, self._sort, num_lines=num_lines, notice=notice, chosen=self._chosen),
            Text(f"{state}   {keys}", style="reverse", no_wrap=True, overflow="ellipsis"),
        )


def show(view: View, console: Console, keyboard_fd: int, interval_s: float) -> None:
    """Redraw until q, Ctrl-C or the end of the terminal. Raises ValueError for records that are damaged."""
    with Keys(keyboard_fd) as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(view.screen(console.height), refresh=True)
                for key in keys.wait(interval_s) or "":
                    if key == "q":
                        return
                    view.press(key)
                view.refresh()
        except (KeyboardInterrupt, EOFError):
            return


def notice_of(snapshot: Snapshot) -> str:
    """One sentence, if the frame needs it."""
    started = snapshot.started
    if started is not None and not Path(f"/proc/{started.pid}").exists():
        return f"backend {started.pid} has ended; this is its last state"
    if snapshot.has_gap:
        return "records were overwritten before they were read, so requests from before are missing"
    return ""
