"""Processes and reports of a benchmark."""

from __future__ import annotations

import os
import platform
import select
import signal
import subprocess
import tempfile
from pathlib import Path

import msgspec
import pytest

from penstock.process.children import module_argv
from penstock.tools.bench.harness import machine
from penstock.tools.bench.harness.report import BenchReport, check_can_write
from penstock.tools.processes import descendants, module_of


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ended_benchmark_leaves_no_server(number: signal.Signals) -> None:
    with tempfile.TemporaryDirectory() as directory:  # its path is short: a socket will be in it
        status = _end_benchmark(Path(directory), number)
        assert status == (-number if number == signal.SIGKILL else 128 + number)
        assert bool(os.listdir(directory)) == (number == signal.SIGKILL)


def _end_benchmark(tmp_path: Path, number: signal.Signals) -> int:
    argv = module_argv("penstock.main", ["bench", "--forward-pass", "fake", "--requests", "1000000"])
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(tmp_path)})
    while not (servers := [pid for pid in descendants(process.pid) if module_of(pid) == "penstock.backend.main"]):
        assert process.poll() is None
    server = os.pidfd_open(servers[0])
    process.send_signal(number)
    status = process.wait()
    assert select.select([server], [], [], 60)[0]
    os.close(server)
    return status


def test_check_can_write_changes_nothing(tmp_path: Path) -> None:
    new, old = tmp_path / "new.json", tmp_path / "old.json"
    old.write_text("kept")
    for path in (new, old):
        check_can_write(path)
    assert not new.exists()
    assert old.read_text() == "kept"


def test_report_can_be_read_back(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    BenchReport(["penstock", "bench"]).write_json(path)
    assert msgspec.json.decode(path.read_bytes())["command"] == ["penstock", "bench"]


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("model\t: 1\nmodel name\t: AMD EPYC\nflags\t: avx2\n", "AMD EPYC"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd40\n", f"{platform.machine()}, CPU implementer 0x41, CPU part 0xd40"),
        ("", platform.machine()),
    ],
)
def test_cpu_is_named_on_x86_and_on_arm(cpuinfo: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert machine._cpu_model(tmp_path / "cpuinfo") == expected
