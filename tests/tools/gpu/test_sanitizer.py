"""The section sanitizer, with a script in the place of compute-sanitizer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.backend.passes.cuda import kernel_manifest
from penstock.tools.gpu.cases.catalogue import small_checks, small_wgmma_checks
from penstock.tools.gpu.checks import sanitizer
from tests.cuda_emulator import EmulatedLauncher
from tests.tools.gpu.device_context import Record

TOOL = sanitizer.SanitizerTool("memcheck", 0.5)


def fake_sanitizer(tmp_path: Path, script: str) -> str:
    path = tmp_path / "compute-sanitizer"
    path.write_text(f"#!{sys.executable}\nimport sys\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "passed", "detail"),
    [
        ("print('checked 9 of 9; failed: none'); print('========= ERROR SUMMARY: 0 errors')", True, "checked 9 of 9"),
        ("print('========= Invalid __global__ write'); sys.exit(97)", False, "Invalid __global__ write"),
        ("print('checked 9 of 9; failed: x\\n========= ERROR SUMMARY: 0 errors'); sys.exit(1)", False, "status 1"),
        (
            "print('checked 0 of 9; failed: none'); print('========= ERROR SUMMARY: 0 errors')",
            None,
            "no check started",
        ),
        ("print('========= Error: Device not supported.'); sys.exit(255)", None, "not measured: the tool does not run"),
    ],
)
def test_sanitizer_output_becomes_a_finding(tmp_path: Path, script: str, passed: bool | None, detail: str) -> None:
    record = Record(tmp_path)
    sanitizer.run_tool(record.results, fake_sanitizer(tmp_path, script), TOOL, ["true"])
    line = json.loads((tmp_path / "findings.jsonl").read_text())
    assert line["passed"] is passed
    assert detail in line["detail"]


RACE = "========= Error: Race reported between Write access at {}+0x1230 in decode_stream.cuh:70"


@pytest.mark.parametrize(
    ("lines", "passed"),
    [
        ([RACE.format("decode_attention")], None),
        ([RACE.format("decode_attention"), RACE.format("add_rms_norm")], False),
        ([RACE.format("decode_attention"), "========= Invalid __shared__ read of size 16 bytes"], False),
        (["========= Error: Race reported between accesses of an unknown kernel"], False),
    ],
)
def test_hazards_of_warp_private_copies_are_findings_to_examine(
    tmp_path: Path, lines: list[str], passed: bool | None
) -> None:
    script = "".join(f"print({line!r})\n" for line in lines) + "sys.exit(97)"
    record = Record(tmp_path)
    sanitizer.run_tool(record.results, fake_sanitizer(tmp_path, script), TOOL, ["true"])
    line = json.loads((tmp_path / "findings.jsonl").read_text())
    assert line["passed"] is passed
    assert ("its ring belongs to a warp" in line["detail"]) == (passed is None)


def test_sanitizer_child_launches_every_kernel_source(capsys: pytest.CaptureFixture[str]) -> None:
    sources: set[str] = set()

    class RecordingLauncher(EmulatedLauncher):
        def launch(self, kernel: Any, grid: Any, *arguments: Any) -> None:
            sources.add(kernel.source)
            super().launch(kernel, grid, *arguments)

    checks = [*small_checks(), *small_wgmma_checks()]
    assert sanitizer.run_small_checks(RecordingLauncher(), checks, float("inf")) == 0
    assert "failed: none" in capsys.readouterr().out
    # The kernel that updates the page table has no case of its own; whole passes run it.
    assert {kernel.source for kernel in kernel_manifest.kernels()} - sources == {"step/step.cu"}


def test_sanitizer_child_stops_at_its_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitizer.run_small_checks(EmulatedLauncher(), small_checks(), 0.0) == 0
    assert "checked 0 of" in capsys.readouterr().out
