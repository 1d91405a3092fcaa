"""Processes of a benchmark: their CPU time, memory and command, from /proc, and how they end."""

from __future__ import annotations

import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """cpu_s is the user and system time of all threads, in steps of 10 ms."""

    pid: int
    cpu_s: float
    rss_bytes: int


def process_use(pid: int) -> ProcessUse:
    """Raises ProcessLookupError."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    # The command's name, in parentheses, may contain anything. The numbers begin after the last parenthesis.
    fields = stat.rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return ProcessUse(pid, ticks / _TICKS_PER_S, int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))


def descendants(pid: int) -> list[int]:
    """Return all processes below pid, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended while we looked
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found[1:]


def stop_with_parent() -> None:
    """Call it in a child as it starts: the child then ends when the benchmark is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def runs_module(pid: int, module: str) -> bool:
    """Return whether the process was started as `python -m module`."""
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return module.encode() in argv
