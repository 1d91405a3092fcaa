"""Names the process that generates a response, so that others on this machine can tell whether it is alive."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from penstock.process.children import stat_fields

_STATE, _STARTED = 0, 19
"""Fields of /proc/PID/stat, counted after the command's name."""
_ENDED = ("Z", "X")


@cache
def own_name() -> str:
    """Return this process's name. It is never reused, not even after a restart of the machine or of a container."""
    started = _started(os.getpid())
    return f"{_machine()}/{os.getpid()}/{started}"


def lives(name: str) -> bool:
    """Return whether the process is alive. One of another container, or from before the machine's start, is not."""
    machine, _, process = name.rpartition("/")[0].rpartition("/")
    started = name.rpartition("/")[2]
    return machine == _machine() and process.isdecimal() and _started(int(process)) == started


@cache
def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def _started(pid: int) -> str | None:
    """Return when the process started, in clock ticks; None if it has ended."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return None
    return None if fields[_STATE] in _ENDED else fields[_STARTED]
