"""`penstock bench` as it is typed, on a server of its own over the fake pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shm.supervisor import module_argv
from tools.bench.processes import descendants, process_use, runs_module
from tools.bench.report import Report


def bench(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    path = tmp_path / "report.json"
    process = subprocess.run(
        module_argv("tools.main", ["bench", "--forward-pass", "fake", "--json", str(path), *arguments]),
        capture_output=True,
        text=True,
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        check=False,
    )
    return process, msgspec.json.decode(path.read_bytes()) if path.exists() else {}


def test_a_row_for_each_concurrency_with_the_machine_beside_it(tmp_path: Path) -> None:
    arguments = ["--concurrency", "1,3", "--prompt-tokens", "4:9", "--output-tokens", "5", "--duplicates", "0.5"]
    process, report = bench(tmp_path, *arguments)
    assert process.returncode == 0, process.stderr
    assert [(row["load"], row["requests"], row["completed"]) for row in report["rows"]] == [
        ("c=1", 4, 4),
        ("c=3", 12, 12),
    ]
    assert [row["output_tokens"] for row in report["rows"]] == [20, 60]
    assert report["machine"]["cpu"]
    assert "c=3" in process.stdout


def test_a_storm_leaves_nothing_behind(tmp_path: Path) -> None:
    arguments = ["--storm", "--requests", "60", "--concurrency", "16", "--endpoint", "chat", "--output-tokens", "24"]
    process, report = bench(tmp_path, *arguments)
    assert process.returncode == 0, process.stdout + process.stderr
    (row,) = report["rows"]
    assert (row["completed"], row["dropped"], row["failed"]) == (30, 30, 0)
    aftermath = report["sections"]["aftermath"]
    assert (aftermath["running"], aftermath["waiting"], aftermath["pages_used"]) == (0, 0, 0)


def test_continuous_and_static_run_the_same_requests(tmp_path: Path) -> None:
    arguments = ["--compare", "static", "--stagger-s", "0.001", "--prompt-tokens", "3:9", "--output-tokens", "4:6"]
    process, report = bench(tmp_path, *arguments)
    assert process.returncode == 0, process.stderr
    comparison = report["sections"]["compare_static"]
    assert comparison["requests"] == 8
    assert len(comparison["rounds"]) == 3
    assert [aim["limit"] for aim in report["aims"]] == [0.95, 4.0]


def test_the_cost_of_a_token_is_told_for_each_process(tmp_path: Path) -> None:
    process, report = bench(tmp_path, "--frontend-cost")
    assert process.returncode == 0, process.stderr
    cost = report["sections"]["frontend_cost"]
    assert cost["output_tokens"] == report["rows"][0]["output_tokens"] > 0
    assert cost["frontend_cpu_us_per_token"] > 0
    assert cost["backend_cpu_us_per_token"] > 0


def test_a_server_that_does_not_start_is_one_line_and_its_own_words(tmp_path: Path) -> None:
    process, report = bench(tmp_path, "--model", str(tmp_path / "nowhere"))
    assert process.returncode == 1
    assert "nowhere" in process.stderr
    assert "Traceback" not in process.stderr
    assert not report


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--url", "nonsense"], "address"),
        (["--url", "http://127.0.0.1:1"], "no connection"),
        (["--storm", "--floor"], "choose one"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(tmp_path: Path, arguments: list[str], reason: str) -> None:
    process, _ = bench(tmp_path, *arguments)
    assert process.returncode == 1
    (line,) = process.stderr.strip().splitlines()
    assert reason in line


def test_a_report_can_be_read_back(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    Report(["penstock", "bench"]).write_json(path)
    assert msgspec.json.decode(path.read_bytes())["command"] == ["penstock", "bench"]


def test_a_process_is_found_with_what_it_uses() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        assert child.pid in descendants(os.getpid())
        assert process_use(child.pid).rss_bytes > 0
        assert process_use(os.getpid()).cpu_s > 0
        assert not runs_module(child.pid, "backend.main")
    finally:
        child.kill()
        child.wait()
    with pytest.raises(ProcessLookupError, match=str(child.pid)):
        process_use(child.pid)
