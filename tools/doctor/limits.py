"""What the system allows this process: memory and open files."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backend.kv_cache.memory import host_memory
from penstock.shm.process.options import format_size
from penstock.tools.doctor.finding import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backend.kv_cache.memory import MemoryInfo

_MIN_FREE_BYTES = 2_000_000_000
_MIN_OPEN_FILES = 8192
"""A connection needs one, and a stream of a local client needs some more for its buffers."""
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def examine_limits() -> Iterator[Finding]:
    yield memory(host_memory())
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    yield huge_pages(_HUGE_PAGES)


def memory(found: MemoryInfo) -> Finding:
    text = f"{format_size(found.free_bytes)} of {format_size(found.total_bytes)} are free on {found.name}"
    if found.free_bytes < _MIN_FREE_BYTES:
        remedy = "end other programs, or raise the container's limit: weights and KV cache must fit into what is free"
        return Finding(Level.WARNING, "memory", text, remedy)
    return Finding(Level.OK, "memory", text)


def open_files(hard_limit: int) -> Finding:
    if hard_limit == resource.RLIM_INFINITY:
        return Finding(Level.OK, "open files", "no limit")
    text = f"at most {hard_limit:,}"
    if hard_limit < _MIN_OPEN_FILES:
        remedy = (
            f"raise it (ulimit -Hn, LimitNOFILE= of systemd) to {_MIN_OPEN_FILES:,} or more: each connection needs one"
        )
        return Finding(Level.WARNING, "open files", text, remedy)
    return Finding(Level.OK, "open files", text)


def huge_pages(setting: Path) -> Finding:
    """setting is a file as the kernel's transparent_hugepage/enabled: the value that holds is in brackets."""
    try:
        value = setting.read_text(encoding="ascii").partition("[")[2].partition("]")[0]
    except OSError:
        value = "unknown"
    if value in ("always", "madvise"):
        return Finding(Level.OK, "huge pages", f"transparent huge pages: {value}")
    remedy = f"echo madvise > {setting} (as root): weights in huge pages are read faster"
    return Finding(Level.NOTE, "huge pages", f"transparent huge pages: {value}", remedy)
