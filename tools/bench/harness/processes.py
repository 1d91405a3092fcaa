"""Processes of a benchmark: their CPU time, memory and command, from /proc, and how they pause and end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """cpu_s is the user and system time of all threads, in steps of 10 ms."""

    pid: int
    cpu_s: float
    rss_bytes: int


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on. Raises ProcessLookupError."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    # The command's name, in parentheses, may contain anything. The state follows the last parenthesis.
    return stat.rpartition(")")[2].split()


def process_use(pid: int) -> ProcessUse:
    """Raises ProcessLookupError."""
    fields = _stat_fields(pid)
    ticks = int(fields[11]) + int(fields[12])
    return ProcessUse(pid, ticks / _TICKS_PER_S, int(fields[21]) * os.sysconf("SC_PAGE_SIZE"))


@dataclass(frozen=True, slots=True)
class ThreadsUse:
    """CPU time of a process's first thread, and of its others together, to the nanosecond."""

    first_s: float
    others_s: float


def threads_use(pid: int) -> ThreadsUse:
    """Threads that have ended are left out. Raises ProcessLookupError."""
    cpu_s: dict[int, float] = {}
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            cpu_s[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
        first_s = cpu_s.pop(pid)
    except (FileNotFoundError, KeyError):
        raise ProcessLookupError(f"no process {pid}, or a kernel without schedstat") from None
    return ThreadsUse(first_s, sum(cpu_s.values()))


def descendants(pid: int) -> list[int]:
    """Return all processes below pid, parents before children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = _stat_fields(int(entry.name))
            except ProcessLookupError:
                continue  # it ended while we looked
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found[1:]


def tree(pid: int) -> list[int]:
    """Return the process and all below it, parents before children.

    A server's tree, not its process group: ours gives its children groups of their own.
    """
    return [pid, *descendants(pid)]


def tree_cpu_s(pid: int) -> float:
    """Return the CPU time of all processes of the tree, and of those that ended and were waited for."""
    ticks = 0
    for each in tree(pid):
        with contextlib.suppress(ProcessLookupError):
            ticks += sum(map(int, _stat_fields(each)[11:15]))
    return ticks / _TICKS_PER_S


def pause_tree(pid: int) -> None:
    """Stop all processes of the tree. Their memory stays, and no time passes for them.

    Parents stop first: a supervisor that still ran could take a stopped child for a hung one.
    """
    paused: set[int] = set()
    while running := [each for each in tree(pid) if each not in paused]:  # a child may start as its parent stops
        _signal_all(running, signal.SIGSTOP)
        paused.update(running)


def resume_tree(pid: int) -> None:
    """Undo `pause_tree`. Children go on first."""
    _signal_all(tree(pid)[::-1], signal.SIGCONT)


def _signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def runs_module(pid: int, module: str) -> bool:
    """Return whether the process was started as `python -m module`."""
    try:
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return module.encode() in argv
