"""The limits of a process, from made-up numbers and files, and those of this process."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import pytest

from penstock.commands.doctor.finding import Level
from penstock.commands.doctor.ulimits import (
    address_space,
    core_files,
    examine_ulimits,
    file_size,
    needed_threads,
    num_free_threads,
    open_files,
    private_memory,
    threads,
)

if TYPE_CHECKING:
    from pathlib import Path

UNLIMITED = resource.RLIM_INFINITY
GB = 1_000_000_000
UID = 4711


def test_limits_below_what_the_server_needs_have_their_remedy() -> None:
    assert open_files(1024).level is Level.WARNING
    assert open_files(UNLIMITED).level is open_files(65_536).level is Level.OK
    assert file_size(1 << 20).level is Level.ERROR
    assert file_size(UNLIMITED).level is file_size(100 * GB).level is Level.OK
    assert address_space(100 * GB).level is Level.WARNING
    assert address_space(UNLIMITED).level is Level.OK
    assert private_memory(4 * GB, 8 * GB).found == "at most 4.00 GB, less than the free memory"
    assert private_memory(UNLIMITED, 8 * GB).level is private_memory(9 * GB, 8 * GB).level is Level.OK
    few = threads(60, needed_threads(2))
    assert (few.level, few.found) == (Level.WARNING, "60 more may start")
    assert "by 20 or more" in few.remedy
    assert threads(None, 80).level is threads(80, 80).level is Level.OK


def test_core_file_is_noted_with_where_it_goes(tmp_path: Path) -> None:
    pattern = tmp_path / "core_pattern"
    assert core_files(0, pattern).level is Level.OK
    unknown = core_files(UNLIMITED, pattern)
    assert (unknown.level, unknown.found) == (Level.NOTE, "a crash writes the process's memory nowhere that is known")
    for text, place in (("/var/core.%p\n", "/var/core.%p"), ("|/lib/systemd/systemd-coredump %P %u", "/lib/systemd/")):
        pattern.write_text(text)
        assert f"memory to {place}" in core_files(GB, pattern).found


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A /proc with 30 threads of the user UID, and a control group of 100 processes inside one without a limit."""
    for pid, uid, count in ((1, 0, 500), (20, UID, 10), (21, UID, 20)):
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/status").write_text(f"Name:\tx\nUid:\t{uid}\t0\t0\t0\nThreads:\t{count}\n")
    (tmp_path / "proc/30").mkdir()  # a process that ends now
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/box\n")
    for group, most in (("pod/box", "100"), ("pod", "max")):
        (tmp_path / "cgroup" / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / group / "pids.max").write_text(f"{most}\n")
        (tmp_path / "cgroup" / group / "pids.current").write_text("40\n")
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "uid", "free"), [(UNLIMITED, UID, 60), (80, UID, 50), (20, UID, 0), (80, 0, 60), (1000, UID, 60)]
)
def test_threads_are_limited_by_the_user_and_by_the_control_group(
    machine: Path, limit: int, uid: int, free: int
) -> None:
    assert num_free_threads(machine / "proc", machine / "cgroup", limit, uid) == free


def test_threads_without_a_limit_are_not_counted(machine: Path) -> None:
    (machine / "cgroup/pod/box/pids.max").write_text("max\n")
    assert num_free_threads(machine / "proc", machine / "cgroup", UNLIMITED, UID) is None


def test_this_process_has_a_finding_for_each_limit() -> None:
    subjects = [finding.subject for finding in examine_ulimits()]
    assert subjects == ["open files", "file size", "address space", "private memory", "threads", "core files"]
