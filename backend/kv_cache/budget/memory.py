"""Total and free memory of a device, for `--kv-budget auto` and the check at start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.backend.errors import StartupError

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Memory of one device, in bytes. name is the machine, GPU or container whose limit applies."""

    total_bytes: int
    free_bytes: int
    name: str


def device_memory(device: str) -> MemoryInfo:
    """Memory of a `PassOptions.device`. Raises StartupError when a GPU does not report it."""
    kind, _, index = device.partition(":")
    return cuda_memory(int(index)) if kind == "cuda" else host_memory()


def cuda_memory(index: int) -> MemoryInfo:
    """Memory of one GPU. Memory of its driver and of this process's context is not free. Raises StartupError."""
    import torch  # only needed once, at start, and never on the CPU

    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    except (RuntimeError, AssertionError, ValueError) as error:  # torch asserts that it was built with CUDA
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise StartupError(f"GPU {index} does not report its free memory: {reason}") from None
    return MemoryInfo(total_bytes, free_bytes, f"GPU {index}")


def host_memory(proc: Path = _PROC, cgroup: Path = _CGROUP) -> MemoryInfo:
    """Memory of the machine, or of the control group around this process that leaves the least."""
    meminfo = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    total_bytes = 1024 * int(meminfo["MemTotal"].split()[0])
    free_bytes = 1024 * int(meminfo["MemAvailable"].split()[0])
    total, free = (
        MemoryInfo(total_bytes, total_bytes, "this machine"),
        MemoryInfo(total_bytes, free_bytes, "this machine"),
    )
    for limit_bytes, used_bytes in _group_limits(proc, cgroup):
        group = MemoryInfo(limit_bytes, max(0, limit_bytes - used_bytes), "this container (its cgroup)")
        total = min(total, group, key=lambda memory: memory.total_bytes)
        free = min(free, group, key=lambda memory: memory.free_bytes)
    return MemoryInfo(total.total_bytes, free.free_bytes, free.name)


def control_groups(controller: str, proc: Path, cgroup: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the directory of every control group around this process, and whether it is one of version 2.

    Inside a container, /proc may name a path that is not mounted; its own group is then the root of the mount, so the
    root is among them.
    """
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        is_version_2 = controllers == ""
        if not is_version_2 and controller not in controllers.split(","):
            continue
        mount = cgroup if is_version_2 else cgroup / controller
        relative = Path(os.path.normpath(path.lstrip("/")))
        if ".." in relative.parts:  # a group outside this one's namespace
            relative = Path()
        for group in (relative, *relative.parents):
            yield mount / group, is_version_2


def _group_limits(proc: Path, cgroup: Path) -> list[tuple[int, int]]:
    """(limit, use) of every control group around this process that has a limit, versions 2 and 1.

    Cached pages of files do not count as used, as in the machine's own MemAvailable: packed weights are mapped files.
    """
    limits = []
    for group, is_version_2 in control_groups("memory", proc, cgroup):
        if is_version_2:
            names = "memory.max", "memory.current", ""
        else:
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
        limit = _group_limit(group, *names)
        if limit is not None:
            limits.append(limit)
    return limits


def _group_limit(group: Path, limit_file: str, use_file: str, prefix: str) -> tuple[int, int] | None:
    """None if there is no limit, or no such group."""
    try:
        limit = (group / limit_file).read_text().strip()
        used_bytes = int((group / use_file).read_text())
        stat = dict(line.split(maxsplit=1) for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if limit == "max":
        return None
    return int(limit), used_bytes - sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
