"""Memory that this process may use, and its pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.backend.kv_cache.budget.memory import MemoryInfo, host_memory
from penstock.commands.doctor.finding import Finding, Level
from penstock.process.options import format_size

_MIN_FREE_BYTES = 2_000_000_000
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def examine_memory() -> Iterator[Finding]:
    yield free_memory(host_memory())
    yield huge_pages(_HUGE_PAGES)


def free_memory(found: MemoryInfo) -> Finding:
    text = f"{format_size(found.free_bytes)} of {format_size(found.total_bytes)} are free on {found.name}"
    if found.free_bytes < _MIN_FREE_BYTES:
        remedy = "end other programs, or raise the container's limit: weights and KV cache must fit into what is free"
        return Finding(Level.WARNING, "memory", text, remedy)
    return Finding(Level.OK, "memory", text)


def huge_pages(setting: Path) -> Finding:
    """setting is a file like the kernel's transparent_hugepage/enabled: the value in brackets applies."""
    try:
        value = setting.read_text(encoding="ascii").partition("[")[2].partition("]")[0]
    except OSError:
        value = "unknown"
    if value in ("always", "madvise"):
        return Finding(Level.OK, "huge pages", f"transparent huge pages: {value}")
    remedy = f"echo madvise > {setting} (as root): weights in huge pages are read faster"
    return Finding(Level.NOTE, "huge pages", f"transparent huge pages: {value}", remedy)
