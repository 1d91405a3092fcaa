"""The limits of each process that ulimit shows. The stack's limit is not checked: the server runs with 128 KiB."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from penstock.backend.kv_cache.budget.memory import control_groups, host_memory
from penstock.backend.passes.cpu.library.thread_counts import num_usable_cores
from penstock.commands.doctor.finding import Finding, Level
from penstock.process.options import format_size

_MIN_OPEN_FILES = 8192
"""A connection needs one, and a stream of a local client needs some more for its buffers."""
_MIN_FILE_BYTES = 1_000_000_000
"""More than the largest shared memory of a process, which counts as a file."""
_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_CORE_PATTERN = Path("/proc/sys/kernel/core_pattern")
_UNLIMITED = resource.RLIM_INFINITY


def examine_ulimits() -> Iterator[Finding]:
    yield open_files(_hard(resource.RLIMIT_NOFILE))
    yield file_size(_soft(resource.RLIMIT_FSIZE))
    yield address_space(_soft(resource.RLIMIT_AS))
    yield private_memory(_soft(resource.RLIMIT_DATA), host_memory().free_bytes)
    yield threads(num_free_threads(), needed_threads(num_usable_cores()))
    yield core_files(_soft(resource.RLIMIT_CORE), _CORE_PATTERN)


def open_files(hard_limit: int) -> Finding:
    if hard_limit == _UNLIMITED:
        return Finding(Level.OK, "open files", "no limit")
    text = f"at most {hard_limit:,}"
    if hard_limit < _MIN_OPEN_FILES:
        remedy = (
            f"raise it (ulimit -Hn, LimitNOFILE= of systemd) to {_MIN_OPEN_FILES:,} or more: each connection needs one"
        )
        return Finding(Level.WARNING, "open files", text, remedy)
    return Finding(Level.OK, "open files", text)


def file_size(limit: int) -> Finding:
    if limit == _UNLIMITED or limit >= _MIN_FILE_BYTES:
        return Finding(Level.OK, "file size", _size(limit))
    remedy = f"raise it (ulimit -f, LimitFSIZE= of systemd) above {format_size(_MIN_FILE_BYTES)}: shared memory counts"
    return Finding(Level.ERROR, "file size", _size(limit), remedy)


def address_space(limit: int) -> Finding:
    if limit == _UNLIMITED:
        return Finding(Level.OK, "address space", "no limit")
    remedy = (
        "ulimit -v unlimited (LimitAS=infinity of systemd): files that are mapped and all that CUDA reserves count, "
        "though they take no memory"
    )
    return Finding(Level.WARNING, "address space", _size(limit), remedy)


def private_memory(limit: int, free_bytes: int) -> Finding:
    """free_bytes is free memory. Weights and KV cache may take as much of it as the limit allows."""
    if limit == _UNLIMITED or limit >= free_bytes:
        return Finding(Level.OK, "private memory", _size(limit))
    remedy = "raise it (ulimit -d, LimitDATA= of systemd): weights and KV cache must fit into it"
    return Finding(Level.WARNING, "private memory", f"{_size(limit)}, less than the free memory", remedy)


def needed_threads(num_cores: int) -> int:
    """A little more than a backend and its frontend start; each has pools with a thread for each core."""
    return 64 + 8 * num_cores


def threads(num_free: int | None, num_needed: int) -> Finding:
    """num_free is None without a limit."""
    if num_free is None:
        return Finding(Level.OK, "threads", "no limit")
    text = f"{num_free:,} more may start"
    if num_free < num_needed:
        remedy = f"raise the limit of processes (ulimit -u, or the container's) by {num_needed - num_free:,} or more"
        return Finding(Level.WARNING, "threads", text, remedy)
    return Finding(Level.OK, "threads", text)


def num_free_threads(
    proc: Path = _PROC, cgroup: Path = _CGROUP, limit: int | None = None, uid: int | None = None
) -> int | None:
    """How many threads may start under the user's limit and those of the control groups; None without a limit."""
    limit = _soft(resource.RLIMIT_NPROC) if limit is None else limit
    uid = os.getuid() if uid is None else uid
    free = []
    if limit != _UNLIMITED and uid != 0:  # the system does not hold root to it
        free.append(limit - _num_threads_of(uid, proc))
    for group, _ in control_groups("pids", proc, cgroup):
        try:
            most, used = (group / "pids.max").read_text().strip(), int((group / "pids.current").read_text())
        except OSError:
            continue
        if most != "max":
            free.append(int(most) - used)
    return max(0, min(free)) if free else None


def core_files(limit: int, pattern_file: Path) -> Finding:
    """pattern_file is as /proc/sys/kernel/core_pattern: a path, or a program after a bar."""
    if limit == 0:
        return Finding(Level.OK, "core files", "a crash writes none")
    try:
        pattern = pattern_file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        pattern = ""
    to = f"to {pattern.removeprefix('|').split()[0]}" if pattern.strip("|").split() else "nowhere that is known"
    remedy = (
        "ulimit -c 0 (LimitCORE=0 of systemd), unless you debug: prompts are in it, and the restart waits until it is "
        "written"
    )
    return Finding(Level.NOTE, "core files", f"a crash writes the process's memory {to}", remedy)


def _num_threads_of(uid: int, proc: Path) -> int:
    count = 0
    for status in proc.glob("[0-9]*/status"):
        try:
            lines = status.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # the process has ended
            continue
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        if int(fields.get("Uid", "-1").split()[0]) == uid:
            count += int(fields.get("Threads", "0"))
    return count


def _soft(kind: int) -> int:
    return resource.getrlimit(kind)[0]


def _hard(kind: int) -> int:
    return resource.getrlimit(kind)[1]


def _size(limit: int) -> str:
    return "no limit" if limit == _UNLIMITED else f"at most {format_size(limit)}"
