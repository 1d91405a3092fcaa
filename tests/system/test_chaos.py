"""The short form of `penstock chaos`: a server behind both proxies, whose processes and clients die."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from penstock.process.children import find_program, module_argv
from penstock.tools.processes import is_running
from tests.system.processes import REPOSITORY, Command, descendants, running

MISSING = [name for name in ("haproxy", "nginx") if find_program(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: apt-get install haproxy nginx-light")
def test_nothing_is_lost_when_processes_and_clients_die_behind_haproxy_and_nginx(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ("--minutes", "0.1", "--requests", "200", "--fault-every-s", "1.5", "--seed", "1080", "--prompts", "12")
    result = subprocess.run(
        module_argv("penstock.main", ("chaos", *options, "--behind", "both", "--report", str(report))),
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert report.is_file(), result.stderr
    found = json.loads(report.read_bytes())
    assert found["imbalances"] == {}, result.stdout + result.stderr
    assert result.returncode == 0, result.stderr
    ends = found["ends"]
    assert sum(ends.values()) == found["requests"] == 200
    assert ends["complete and right"] > 30
    assert ends["dropped by us"] > 50
    assert ends["failed"] == 0
    assert found["faults"][0]["kind"] == "backend killed"
    assert set(found["descriptors"]) >= {"supervisor", "backend", "frontend", "worker"}


def test_chaos_that_is_terminated_stops_everything_that_it_started(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    chaos = Command("penstock.main", "chaos", "--prompts", "2", "--keep-logs", str(logs))
    with running(chaos):
        chaos.wait_for("undisturbed answers")
        started = descendants(chaos.process.pid)
        assert len(started) >= 6
        assert chaos.terminate() == 128 + signal.SIGTERM
    assert [pid for pid in started if is_running(pid)] == []
    assert [path.name for path in (logs / "run").rglob("*") if path.is_socket()] == []
