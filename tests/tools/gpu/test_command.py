"""gpu-check's command lines, run through to the sections' processes.

`sitecustomize` installs the emulated device, a clock with a fixed time, and small sizes in those processes.
"""

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
from penstock.tools.gpu.reporting.baseline import load_baseline
from penstock.tools.gpu.reporting.goals import GOALS

ROOT = Path(penstock.tools.gpu.__file__).parents[3]
DEADLINE_S = 240.0
IN_SECTIONS = """
import os, sys
if "--section" in sys.orig_argv:
    from dataclasses import replace
    from functools import partial
    from penstock.backend.passes.decoder.cuda import kernel_manifest
    from penstock.backend.passes.decoder.ops import HeadShape
    from tests.cuda_emulator import EmulatedLauncher
    from tests.backend.passes.decoder.cuda.emulated_device import EmulatedDevice
    from tests.tools.gpu.device_context import NoMemoryCounter
    from penstock.tools.gpu.cases import catalogue
    from penstock.tools.gpu.cases.attention import choices, decode
    from penstock.tools.gpu.devices import device_context, mirror_launcher
    from penstock.tools.gpu.speed import attention_peers, kernel_cases

    class FixedClock:
        def work_us(self, variants):
            for variant in variants:
                variant()
            return float(os.environ["FIXED_US"])
        def once_us(self, work):
            work()
            return float(os.environ["FIXED_US"])

    class Mirror(EmulatedLauncher):
        shared_bytes_per_sm = decode.H200_SHARED_BYTES
        has_wgmma = False

    device_context.open_device_context = lambda: device_context.DeviceContext(
        EmulatedDevice(), FixedClock(), NoMemoryCounter(), EmulatedDevice
    )
    mirror_launcher.MirrorLauncher = Mirror
    kernels = [kernel for kernel in kernel_manifest.kernels() if kernel.source == "norms.cu"]
    kernel_manifest.kernels = lambda: iter(kernels)
    choices.kernels = lambda: iter(())
    quick = catalogue.quick_checks
    catalogue.quick_checks = lambda *_: (check for check in quick() if check.family in ("ptx", "norm"))
    attention_peers._FLEX_S = float("inf")  # test_kernel_speed.py compiles flex attention, which takes half a minute
    attention_peers.measure = partial(attention_peers.measure, decode=(("d", 2, 64),), prefill=(("p", 32),))
    kernel_cases.KernelSizes = partial(
        kernel_cases.KernelSizes, heads=HeadShape(4, 2, 64), decode=(("64x1k", 2, 40, "bf16"), ("1x1k", 1, 40, "q8_0")),
        prefill=(("4k", 0, 40, "bf16"),), encoder=(("128x128", 2, 20, None),), encoder_heads=2,
        sampling_rows=2, vocab_size=300, elementwise_tokens=(5,), hidden=128, intermediate=64,
        product_rows=(1,), fused_rows=(1,), expert_tokens=(), cold_bytes=1,
    )
"""
STUBS = """
import sys
from penstock.tools.gpu import runner
runner._REPORT_EVERY_S, runner._GRACE_S = 0.05, 0.5
runner.SECTIONS = tuple(runner.Section(name, f"stub_{name}", 1) for name in ("first", "endless", "last"))
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory at the front of PYTHONPATH, with an nvidia-smi that prints a GPU's name."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a run that is killed leaves its folder
    return tmp_path


def command(place: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "penstock.tools.gpu", "--out", str(place / "out"), "--commit", "abc", *options]


def run(place: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(place, *options), capture_output=True, text=True, check=False, cwd=ROOT, timeout=DEADLINE_S
    )


def read_report(place: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((place / "out" / "report.json").read_text())
    return report


def test_quick_run_is_the_baseline_of_a_whole_runs_sections(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "sitecustomize.py").write_text(IN_SECTIONS)
    kept = place / "kept.json"
    monkeypatch.setenv("FIXED_US", "100")
    done = run(place, "--quick", "--save-baseline", str(kept))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    report = read_report(place)
    assert [(section["name"], section["outcome"]) for section in report["sections"]] == [
        ("compile", "done"), ("correctness", "done"), ("kernels", "done"),
    ]  # fmt: skip
    names = {finding["name"] for section in report["sections"] for finding in section["findings"]}
    assert {"compile.sm_90a.no_spills", "correctness.norm", "attention.decode.1x1k", "sampling.256x128k.plain"} <= names
    assert report["environment"]["gpu"] == "NVIDIA H200"
    assert {row["finding"] for row in report["goals"] if row["met"] is not None} == {
        "attention.decode.64x1k", "attention.decode.1x1k", "attention.prefill.4k", "sampling.256x128k.plain",
        "sampling.256x128k.filtered",
    }  # fmt: skip
    assert f"of {len(GOALS)} not measured" in done.stdout
    assert load_baseline(kept).figures["attention.decode.1x1k"].value == 100
    assert sorted(path.name for path in (place / "out").iterdir()) == ["cubins", "report.json", "report.md"]

    monkeypatch.setenv("FIXED_US", "120")
    options = ("--only", "kernels,nano-vllm", "--peers", str(place), "--baseline", str(kept), "--budget", "200")
    done = run(place, *options)
    assert done.returncode == 1
    assert "FAILED baseline: baseline.attention.decode.1x1k 20.0 % worse than 100" in done.stdout
    report = read_report(place)
    assert all(row["verdict"] == "fail" for row in report["compared"])
    kernels, nano_vllm, _baseline = report["sections"]
    names = {finding["name"] for finding in kernels["findings"]}
    assert {"peer.fa3", "peer.cudnn.prefill.p"} <= names
    assert nano_vllm["findings"][0]["detail"] == "not measured: nanovllm is neither installed nor in --peers"


def test_only_refuses_sections_that_a_quick_run_does_not_have(place: Path) -> None:
    done = run(place, "--quick", "--only", "peers")
    assert done.returncode == 2
    assert "--only names peers; choose from compile, correctness, kernels" in done.stderr


def write_stubs(place: Path) -> None:
    (place / "sitecustomize.py").write_text(STUBS)
    (place / "stub_first.py").write_text("def run(results):\n    results.fact('early', 1)\n")
    (place / "stub_last.py").write_text("def run(results):\n    results.fact('late', 1)\n")
    (place / "stub_endless.py").write_text(
        "import os, threading\ndef run(results):\n    results.fact('pid', os.getpid())\n    threading.Event().wait()\n"
    )


def wait_for_pid(place: Path) -> int:
    """The endless section's process id, from the report that is written while it runs."""
    for _ in range(int(DEADLINE_S / 0.05)):
        if (place / "out" / "report.json").exists():
            for section in read_report(place)["sections"]:
                for finding in section["findings"]:
                    if finding["name"] == "pid":
                        return int(finding["value"])
        threading.Event().wait(0.05)
    raise AssertionError("the section did not start")


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


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, -2)])
def test_killed_run_leaves_its_report_and_no_process(place: Path, number: int, status: int) -> None:
    write_stubs(place)
    child = subprocess.Popen(command(place, "--budget", "600"), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=-3)
    try:
        pid = wait_for_pid(place)
        child.send_signal(number)
        assert child.wait(DEADLINE_S) == status
    finally:
        child.kill()
        child.wait()
    assert has_ended(pid)
    assert (number == signal.SIGKILL) == bool(list(place.glob("gpu-check-*")))
    sections = read_report(place)["sections"]
    assert [(section["name"], section["outcome"]) for section in sections] == [
        ("first", "done"),
        ("endless", "running"),
    ]
    assert sections[1]["findings"][0]["name"] == "pid"
    assert not sections[1]["passed"]
    assert "endless: running" in (place / "out" / "report.md").read_text()


def test_endless_section_takes_only_its_own_time_and_no_section_leaves_a_process(place: Path) -> None:
    write_stubs(place)
    (place / "stub_last.py").write_text(
        "import subprocess\ndef run(results):\n    results.fact('left', subprocess.Popen(['sleep', '600']).pid)\n"
    )
    done = run(place, "--budget", "10")
    assert done.returncode == 1
    sections = read_report(place)["sections"]
    outcomes = {section["name"]: section["outcome"] for section in sections}
    assert outcomes == {"first": "done", "endless": "timed out", "last": "done"}
    assert done.stdout.endswith("failed: endless\n")
    assert has_ended(int(sections[2]["findings"][0]["value"]))


RESUMED = """
import os, threading
from pathlib import Path
def run(results):
    results.attempt("early", lambda: results.fact("early", os.getpid()))
    results.fact("pid", os.getpid())
    if not Path(os.environ["GO_ON"]).exists():
        threading.Event().wait()
    results.attempt("late", lambda: results.fact("late", 1))
"""


def test_killed_part_goes_on_where_it_stopped(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "sitecustomize.py").write_text(
        STUBS.replace("1) for name", '1, "a") for name') + "\nrunner.PARTS = ('a',)\n"
    )
    monkeypatch.setenv("GO_ON", str(place / "go-on"))
    (place / "stub_first.py").write_text("import os\ndef run(results):\n    results.fact('first', os.getpid())\n")
    (place / "stub_endless.py").write_text(RESUMED)
    (place / "stub_last.py").write_text("def run(results):\n    results.check('last', True)\n")
    child = subprocess.Popen(command(place, "--part", "a"), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=-3)
    try:
        pid = wait_for_pid(place)
    finally:
        child.kill()
        child.wait()
    assert has_ended(pid)
    (place / "go-on").touch()
    before = {
        finding["name"]: finding["value"]
        for section in read_report(place)["sections"]
        for finding in section["findings"]
    }
    done = run(place, "--part", "a")
    assert (done.returncode, done.stderr) == (0, "")
    assert "first (" not in done.stdout
    sections = read_report(place)["sections"]
    assert [section["outcome"] for section in sections] == ["done"] * 3
    after = {finding["name"]: finding["value"] for section in sections for finding in section["findings"]}
    assert (after["first"], after["early"]) == (before["first"], before["early"])
    assert after["pid"] != before["pid"]
    assert after["late"] == 1

    done = run(place, "--part", "a")
    assert (done.returncode, "3 of 3 sections passed" in done.stdout) == (0, True)
    other = [*command(place, "--part", "a"), "--commit", "def"]
    refused = subprocess.run(other, capture_output=True, text=True, check=False, cwd=ROOT, timeout=DEADLINE_S)
    assert refused.returncode == 2
    assert "give another --out" in refused.stderr
