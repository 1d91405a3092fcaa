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

ROOT = Path(penstock.tools.gpu.__file__).parents[3]
DEADLINE_S = 240.0
IN_SECTIONS = """
import sys
if {"--section", "penstock.tools.gpu.checks.correctness"} & set(sys.orig_argv):
    from functools import partial
    from penstock.backend.passes.cuda import kernel_manifest
    from penstock.backend.passes.ops.interface import HeadShape
    from tests.cuda_emulator import EmulatedLauncher
    from tests.backend.passes.cuda.emulated_device import EmulatedDevice
    from tests.tools.gpu.device_context import NoMemoryCounter
    from penstock.tools.gpu.cases.attention import choices, decode
    from penstock.tools.gpu.devices import device_context, mirror_launcher
    from penstock.tools.gpu.speed import kernel_cases

    class FixedClock:
        def work_us(self, variants):
            for variant in variants:
                variant()
            return 100.0
        def once_us(self, work):
            work()
            return 100.0

    class Mirror(EmulatedLauncher):
        shared_bytes_per_sm = decode.H200_SHARED_BYTES
        has_wgmma = False

    device_context.open_device_context = lambda: device_context.DeviceContext(
        EmulatedDevice(), FixedClock(), NoMemoryCounter(), EmulatedDevice
    )
    mirror_launcher.MirrorLauncher = Mirror
    kernels = [kernel for kernel in kernel_manifest.kernels() if kernel.source == "rows/norms.cu"]
    kernel_manifest.kernels = lambda: iter(kernels)
    choices.kernels = lambda: iter(())
    if "--section" in sys.orig_argv:
        from penstock.tools.gpu.checks import correctness
        correctness.SHARES = {"other-kernels": correctness.SHARES["other-kernels"]}
    kernel_cases.KernelSizes = partial(
        kernel_cases.KernelSizes, heads=HeadShape(4, 2, 64), decode=(("64x1k", 2, 40, "bf16"), ("1x1k", 1, 40, "q8_0")),
        prefill=(("4k", 0, 40, "bf16"),), encoder=(("128x128", 2, 20, None),), encoder_heads=2,
        sampling_rows=2, vocab_size=300, elementwise_tokens=(5,), hidden=128, intermediate=64,
        product_rows=(1,), fused_rows=(1,), expert_tokens=(), cold_bytes=1, library_rows=(1,), peers=(),
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


def test_sections_run_in_the_given_order_with_the_chosen_checks_and_settings(place: Path) -> None:
    (place / "sitecustomize.py").write_text(IN_SECTIONS)
    (place / "choices.toml").write_text("chunk_tokens = 128\n")
    options = ("--only", "kernels,compile,correctness", "--match", "^norm|1x1k|plain", "--budget", "300")
    done = run(place, *options, "--choices", str(place / "choices.toml"))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    report = read_report(place)
    assert [(section["name"], section["outcome"]) for section in report["sections"]] == [
        ("kernels", "done"), ("compile", "done"), ("correctness", "done"),
    ]  # fmt: skip
    names = {finding["name"] for section in report["sections"] for finding in section["findings"]}
    assert {"compile.sm_90a.no_spills", "correctness.norm", "attention.decode.1x1k", "sampling.256x128k.plain"} <= names
    assert not {"attention.decode.64x1k", "correctness.ptx"} & names
    assert report["environment"]["gpu"] == "NVIDIA H200"
    assert sorted(path.name for path in (place / "out").iterdir()) == ["cubins", "report.json", "report.md"]


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
