"""Free memory, read from /proc and /sys/fs/cgroup as they are on machines and in containers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from penstock.backend.errors import StartupError
from penstock.backend.kv_cache.budget.memory import MemoryInfo, device_memory, host_memory

if TYPE_CHECKING:
    from pathlib import Path

GB = 10**9
UNLIMITED_V1 = "9223372036854771712"
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
V2 = ("memory.max", "memory.current", "")


class Machine:
    """Files as the kernel shows them: 16,000,000 units of 1,024 bytes, three quarters of them available."""

    def __init__(self, root: Path, groups: str) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(
            "MemTotal:    16000000 kB\nMemFree:      1000000 kB\nMemAvailable: 12000000 kB\nHugePages_Total:    0\n"
        )
        (self.proc / "self/cgroup").write_text(groups)

    def group(self, path: str, names: tuple[str, str, str], limit: str, used: int, cached: int) -> None:
        directory = self.cgroup / path
        directory.mkdir(parents=True, exist_ok=True)
        limit_file, use_file, prefix = names
        (directory / limit_file).write_text(f"{limit}\n")
        (directory / use_file).write_text(f"{used}\n")
        parts = {"inactive_file": cached - cached // 2, "active_file": cached // 2}
        lines = (f"{prefix}{name} {size}\n" for name, size in parts.items())
        (directory / "memory.stat").write_text("anon 5\n" + "".join(lines))

    def memory(self) -> MemoryInfo:
        return host_memory(self.proc, self.cgroup)


def test_memory_without_a_limit_is_that_of_the_machine(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/user.slice/session-1.scope\n")
    machine.group("user.slice/session-1.scope", V2, "max", GB, 0)
    assert machine.memory() == MemoryInfo(16_000_000 * 1024, 12_000_000 * 1024, "this machine")


def test_limit_minus_use_is_free_and_cached_files_do_not_count_as_use(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/\n")
    machine.group("", V2, str(4 * GB), 3 * GB, 2 * GB)
    assert machine.memory() == MemoryInfo(4 * GB, 3 * GB, "this container (its cgroup)")


def test_narrowest_group_around_the_process_counts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/pods/pod-1/container\n")
    machine.group("pods/pod-1/container", V2, "max", GB, 0)
    machine.group("pods/pod-1", V2, str(8 * GB), 7 * GB, 0)
    machine.group("pods", V2, str(6 * GB), GB, 0)
    assert machine.memory() == MemoryInfo(6 * GB, GB, "this container (its cgroup)")


def test_limit_above_the_machines_free_memory_changes_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/a\n")
    machine.group("a", V2, str(15 * GB), 0, 0)
    assert machine.memory() == MemoryInfo(15 * GB, 12_000_000 * 1024, "this machine")


@pytest.mark.parametrize("path", ["docker/0123", ""])
def test_cgroup_version_1_is_read_with_its_own_names(tmp_path: Path, path: str) -> None:
    """In a container, /proc names the path outside; the mounted group is the root."""
    machine = Machine(tmp_path, "5:cpu,cpuacct:/docker/0123\n4:hugetlb,memory:/docker/0123\n1:name=systemd:/\n0::/\n")
    machine.group("memory", V1, UNLIMITED_V1, 7, 0)
    machine.group(f"memory/{path}", V1, str(2 * GB), GB // 2, 0)
    assert machine.memory() == MemoryInfo(2 * GB, 2 * GB - GB // 2, "this container (its cgroup)")


@pytest.mark.parametrize("groups", ["0::/../../outside\n", "0::/gone\n", ""])
def test_invisible_group_is_ignored_and_the_root_is_still_read(tmp_path: Path, groups: str) -> None:
    machine = Machine(tmp_path, groups)
    (tmp_path / "outside").mkdir()
    machine.group("", V2, str(5 * GB), 0, 0)
    assert machine.memory().total_bytes == (5 * GB if groups else 16_000_000 * 1024)


def test_use_above_the_limit_leaves_nothing_free(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "0::/\n")
    machine.group("", V2, str(GB), 2 * GB, 0)
    assert machine.memory().free_bytes == 0


def test_memory_of_this_machine_is_read() -> None:
    memory = device_memory("cpu")
    assert 0 < memory.free_bytes <= memory.total_bytes


def test_gpu_memory_is_read_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (index * GB, 8 * GB))
    assert device_memory("cuda:3") == MemoryInfo(8 * GB, 3 * GB, "GPU 3")


def test_gpu_that_does_not_answer_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_index: int) -> None:
        raise RuntimeError("CUDA error: invalid device ordinal\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    with pytest.raises(StartupError) as refused:
        device_memory("cuda:9")
    assert str(refused.value) == "GPU 9 does not report its free memory: CUDA error: invalid device ordinal"
