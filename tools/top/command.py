"""`penstock top`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from penstock.shm.process.options import fail
from penstock.shm.recording.live import LiveEngine
from penstock.shm.recording.rings import NoRing, open_ring
from penstock.tools.top.frame import HELP, draw, num_lines_that_fit
from penstock.tools.top.keys import Keys
from penstock.tools.top.snapshot import Meter, Sort

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.tools.top.snapshot import Snapshot

_COMMAND = "penstock top"
_ONCE_LINES = 1000
_SORT_OF_KEY = {sort.value[0]: sort for sort in Sort}


def top(
    *,
    once: bool = False,
    sort: Sort = Sort.AGE,
    pid: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    interval: Annotated[float, Parameter(validator=Number(gte=0.1, lte=60.0))] = 1.0,
) -> None:
    """Shows what a running server of this user does: requests, steps, pages, tenants and rates.

    Keys: a, g, r, p, t and s sort by age, generated tokens, rate, prompt, tenant and state; the space bar pauses; q
    ends.

    Parameters
    ----------
    once
        Print one frame as text and end, for scripts and for terminals that cannot move the cursor.
    sort
        Sort requests so at first.
    pid
        Process id of the server or of its backend. Default: the only one of this user.
    interval
        Seconds between frames.
    """
    console = Console()
    if not once and not (console.is_terminal and not console.is_dumb_terminal and sys.stdin.isatty()):
        fail(_COMMAND, "this is no terminal that can be redrawn; give --once to print one frame")
    try:
        ring, _ = open_ring(pid)
    except NoRing as error:
        fail(_COMMAND, str(error))
    try:
        meter = Meter(LiveEngine(ring))
        if once:
            snapshot = meter.take(time.monotonic())
            console.print(draw(snapshot, sort, num_lines=_ONCE_LINES, notice=notice_of(snapshot)))
        else:
            show(meter, console, sys.stdin.fileno(), sort, interval)
    except ValueError as error:
        fail(_COMMAND, f"the flight recorder cannot be read: {error}")
    finally:
        ring.close()


def show(meter: Meter, console: Console, keyboard_fd: int, sort: Sort, interval_s: float) -> None:
    """Redraw until q, Ctrl-C or the end of the terminal. Raises ValueError for records that are damaged."""
    is_paused, snapshot = False, meter.take(time.monotonic())
    with Keys(keyboard_fd) as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(_screen(snapshot, sort, console.height, is_paused=is_paused), refresh=True)
                for key in keys.wait(interval_s) or "":
                    if key == "q":
                        return
                    is_paused ^= key == " "
                    sort = _SORT_OF_KEY.get(key, sort)
                latest = meter.take(time.monotonic())
                snapshot = snapshot if is_paused else latest
        except (KeyboardInterrupt, EOFError):
            return


def _screen(snapshot: Snapshot, sort: Sort, height: int, *, is_paused: bool) -> RenderableType:
    num_lines = num_lines_that_fit(height, snapshot)
    state = f"sorted by {sort.value}{'   PAUSED' if is_paused else ''}"
    return Group(
        draw(snapshot, sort, num_lines=num_lines, notice=notice_of(snapshot)),
        Text(f"{state}   {HELP}", style="reverse", no_wrap=True, overflow="ellipsis"),
    )


def notice_of(snapshot: Snapshot) -> str:
    """One sentence, if the frame needs it."""
    started = snapshot.started
    if started is not None and not Path(f"/proc/{started.pid}").exists():
        return f"backend {started.pid} has ended; this is its last state"
    if snapshot.has_gap:
        return "records were overwritten before they were read, so requests from before are missing"
    return ""
