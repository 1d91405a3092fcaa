"""gpu-check's command line with real processes, whose items are stubs that `sitecustomize` installs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import penstock.tools.gpu
from penstock.tools.gpu.results import NO_TIME

ROOT = Path(penstock.tools.gpu.__file__).parents[3]
DEADLINE_S = 240.0
STUBS = """
from penstock.tools.gpu import items, runner
runner._REPORT_EVERY_S, runner._GRACE_S = 0.05, 0.5
items._START_S, items.SLACK_S = 1.0, 0.5
items.ITEMS = tuple(
    items.Item(name, seconds, "stubs", (name,), is_beside)
    for name, seconds, is_beside in (
        ("early", 1, False), ("dies", 1, False), ("raises", 1, False), ("hangs", 0.3, False), ("long", 500, False),
        ("left", 1, False), ("besides.one", 1, True), ("besides.two", 1, True), ("endless", 400, False),
    )
)
"""
MODULE = """
import os, pathlib, subprocess, threading
def run(results, item):
    results.fact(item.name, os.getpid())
    name = item.arguments[0]
    if name == "dies":
        os.abort()
    if name == "raises":
        raise ValueError("what happened")
    if name in ("hangs", "endless"):
        threading.Event().wait()
    if name == "left":
        results.fact("child", subprocess.Popen(["sleep", "600"]).pid)
    if name.startswith("besides"):  # each waits for the other
        place = pathlib.Path(__file__).parent
        (place / name).touch()
        while len(list(place.glob("besides.*"))) < 2:
            threading.Event().wait(0.01)
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory at the front of PYTHONPATH, with an nvidia-smi that prints a GPU's name, or a sample."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\ncase $1 in *name*) echo 'NVIDIA H200, 570, 1980, 2619, 700' ;;\n"
                   "*) echo '1980, 2619, 612.5, 55'; exec sleep 600 ;; esac\n")  # fmt: skip
    smi.chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(STUBS)
    (tmp_path / "stubs.py").write_text(MODULE)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a run that is killed leaves its folder
    return tmp_path


def command(place: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "penstock.tools.gpu", "--out", str(place / "out"), "--commit", "abc", *options]


def read_report(place: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((place / "out" / "report.json").read_text())
    return report


def has_ended(pid: int) -> bool:
    """Wait for the process to end; a zombie counts as ended."""
    ends_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < ends_s:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        threading.Event().wait(0.02)
    return False


def test_items_that_fit_run_in_order_and_one_that_fails_ends_no_other(place: Path) -> None:
    argv = command(place, "--seconds", "100", "--first", "left,early,dies,raises,hangs")
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT, timeout=DEADLINE_S)
    assert done.returncode == 1
    report = read_report(place)
    assert [(item["name"], item["outcome"]) for item in report["items"]] == [
        ("left", "done"), ("early", "done"), ("dies", "ended with status -6"), ("raises", "done"),
        ("hangs", "timed out"), ("long", NO_TIME), ("besides.one", "done"), ("besides.two", "done"),
        ("endless", NO_TIME),
    ]  # fmt: skip
    findings = [finding for item in report["items"] for finding in item["findings"]]
    assert ["what happened" in each["detail"] for each in findings if each["passed"] is False] == [True]
    pids = {finding["name"]: finding["value"] for finding in findings if finding["value"]}
    assert pids["left"] == pids["early"] == pids["dies"] != pids["raises"]
    assert pids["besides.one"] != pids["besides.two"]
    assert has_ended(pids["child"])
    assert report["environment"]["gpu"] == "NVIDIA H200"
    assert report["environment"]["power.limit"] == "700"
    assert report["clocks"][0]["watts"] == 612.5
    assert f"* {NO_TIME}: endless, long" in done.stdout
    assert done.stdout.endswith(f"7 of 9 items ran, 3 failed; {place / 'out' / 'report.md'}\n")
    assert sorted(path.name for path in (place / "out").iterdir()) == ["report.json", "report.md"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, -2)])
def test_killed_run_leaves_its_report_and_no_process(place: Path, number: int, status: int) -> None:
    argv = command(place, "--seconds", "600", "--first", "early,endless")
    child = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=-3)
    try:
        pid = wait_for_endless(place)
        child.send_signal(number)
        assert child.wait(DEADLINE_S) == status
    finally:
        child.kill()
        child.wait()
    assert has_ended(pid)
    assert (number == signal.SIGKILL) == bool(list(place.glob("gpu-check-*")))
    found = read_report(place)["items"]
    assert [(item["name"], item["outcome"]) for item in found] == [("early", "done"), ("endless", "running")]
    assert "* running: endless" in (place / "out" / "report.md").read_text()


def wait_for_endless(place: Path) -> int:
    """Its process id, from the report that is written while it runs."""
    for _ in range(int(DEADLINE_S / 0.05)):
        if (place / "out" / "report.json").exists():
            for item in read_report(place)["items"]:
                if item["name"] == "endless" and item["findings"]:
                    return int(item["findings"][0]["value"])
        threading.Event().wait(0.05)
    raise AssertionError("the item did not start")


def test_run_without_a_gpu_fails_and_says_so(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "penstock.tools.gpu", "--first", "environment", "--out", str(tmp_path)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT, timeout=DEADLINE_S)
    assert done.returncode == 1
    assert "torch finds no CUDA device" in (tmp_path / "report.md").read_text()
