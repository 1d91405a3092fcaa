"""Runs compute-sanitizer over every kernel: out-of-bounds accesses, races, barriers and uninitialised reads."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from glob import glob

from penstock.backend.passes.cuda.device.launcher import Launcher
from penstock.tools.gpu.cases.catalogue import small_checks, small_wgmma_checks
from penstock.tools.gpu.cases.check import Check
from penstock.tools.gpu.devices.mirror_launcher import MirrorLauncher
from penstock.tools.gpu.results import DEADLINE_VARIABLE, Results

_SEARCH_PATHS = (
    "/usr/local/cuda/bin/compute-sanitizer",
    "/usr/local/cuda*/bin/compute-sanitizer",
    "/usr/local/cuda*/compute-sanitizer/compute-sanitizer",
    "/opt/nvidia/*/compute-sanitizer",
)
_FOUND_ERRORS = 97
"""The exit status that we ask the tool to use for its findings."""
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: .*")
_DONE = re.compile(r"checked (\d+) of (\d+)")
_LEAST_S = 8.0
_HAZARD = re.compile(r"(?:Race reported|hazard).*?\bat \w*?(\w+)\+0x|(?:Race reported|hazard).*?\bin (\w+)")
UNDECIDED = {
    "decode_attention": "its ring belongs to a warp, which waits for its own cp.async and then for its lanes",
    "multiply_and_add": "each lane reads only what its own cp.async brought",
    "multiply_and_gate": "each lane reads only what its own cp.async brought",
    "multiply_and_store": "each lane reads only what its own cp.async brought",
    "multiply_rows": "each lane reads only what its own cp.async brought",
}
"""Kernels in which racecheck's hazards are findings to examine, not failures, with the reason for false reports.

The emulator, which knows cp.async and its waits, finds no race in them in any order of threads.
"""
_STOP_EARLY_S = 5.0
"""The child stops this long before its timeout, because a killed child reports nothing."""


@dataclass(frozen=True)
class SanitizerTool:
    """One tool of compute-sanitizer. share: its part of the section's remaining time."""

    name: str
    share: float
    options: tuple[str, ...] = ()


TOOLS = (
    # No API errors: torch and CuPy make calls that may fail, and handle the failure themselves.
    SanitizerTool("memcheck", 0.35, ("--report-api-errors", "no")),
    SanitizerTool("racecheck", 0.55, ("--racecheck-report", "analysis")),
    SanitizerTool("synccheck", 0.6),
    # No API accesses: the child leaves poisoned outputs unwritten on the device, and copies them back.
    SanitizerTool("initcheck", 1.0, ("--check-api-memory-access", "no")),
)


def run(results: Results) -> None:
    path = find_sanitizer()
    if path is None:
        results.skipped("sanitizer", "compute-sanitizer is not installed")
        return
    results.fact("sanitizer.path", path)
    command = [sys.executable, "-m", "penstock.tools.gpu.checks.sanitizer"]
    for tool in TOOLS:
        results.attempt(f"sanitizer.{tool.name}", partial(run_tool, results, path, tool, command), _LEAST_S)


def find_sanitizer() -> str | None:
    found = shutil.which("compute-sanitizer")
    return found or next(
        (path for pattern in _SEARCH_PATHS for path in sorted(glob(pattern)) if os.access(path, os.X_OK)), None
    )


def run_tool(results: Results, path: str, tool: SanitizerTool, command: Sequence[str]) -> None:
    """Record one finding: passed if checks ran and the tool found nothing, skipped if the tool does not run here."""
    name = f"sanitizer.{tool.name}"
    budget_s = max(results.remaining_s * tool.share, _LEAST_S)
    argv = [path, "--tool", tool.name, "--error-exitcode", str(_FOUND_ERRORS), "--print-limit", "3", *tool.options]
    until_s = time.monotonic() + budget_s - _STOP_EARLY_S
    environment = os.environ | {DEADLINE_VARIABLE: str(until_s)}
    leaves_unwritten = ["--leave-poison"] if tool.name == "initcheck" else []
    try:
        done = subprocess.run(
            [*argv, *command, *leaves_unwritten],
            capture_output=True, text=True, check=False, timeout=budget_s + _STOP_EARLY_S, env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        results.skipped(name, f"not done after {budget_s:.0f} s")
        return
    output = done.stdout + done.stderr
    summary, checked = _SUMMARY.search(output), _DONE.search(output)
    lines = [line.strip("= ") for line in output.splitlines() if line.startswith("=========")]
    if done.returncode == 0 and summary and checked and int(checked[1]):
        results.check(name, True, f"{checked[0]}; {summary[0]}")
    elif done.returncode == 0 and checked and not int(checked[1]):
        results.skipped(name, f"no check started within {budget_s:.0f} s")
    elif done.returncode == _FOUND_ERRORS and (kernels := hazards(output)) and kernels <= UNDECIDED.keys():
        reasons = "; ".join(f"{kernel}: {UNDECIDED[kernel]}" for kernel in sorted(kernels))
        results.fact(name, "hazards to examine", "", f"{reasons}; {'; '.join(lines)[:1200]}")
    elif done.returncode == _FOUND_ERRORS:
        results.check(name, False, "; ".join(lines)[:1500] or output[-500:])
    elif summary is None:
        results.skipped(name, f"the tool does not run here: {'; '.join(lines)[:300] or output.strip()[-300:]}")
    else:
        results.check(name, False, f"status {done.returncode}: {output.strip()[-500:]}")


def hazards(output: str) -> set[str]:
    """Kernels with hazards in racecheck's output; empty if there are other errors, or a hazard without a kernel."""
    lines = [line for line in output.splitlines() if re.search(r"Race reported|hazard", line) and "SUMMARY" not in line]
    found = [_HAZARD.search(line) for line in lines]
    others = re.search(r"Invalid __|Uninitialized|Barrier error|Program hit", output)
    if others or not all(found):
        return set()
    return {match[1] or match[2] for match in found if match}


# ---- The process that compute-sanitizer watches; torch does not use the GPU there ----


def main(argv: list[str]) -> int:
    leaves_poison = "--leave-poison" in argv
    launcher = MirrorLauncher(pooled=False, leaves_poison=leaves_poison)
    until_s = float(os.environ.get(DEADLINE_VARIABLE, "inf"))
    checks = [*small_checks(launcher.shared_bytes_per_sm), *(small_wgmma_checks() if launcher.has_wgmma else ())]
    status = run_small_checks(launcher, checks, until_s)
    return 0 if leaves_poison else status  # with --leave-poison the comparisons are meaningless


def run_small_checks(launcher: Launcher, checks: Iterable[Check], until_s: float) -> int:
    """Run checks until until_s of the monotonic clock. Returns the exit status: 1 if a check failed."""
    checks = list(checks)
    failed, num_run = [], 0
    for check in checks:
        if time.monotonic() > until_s:
            break
        num_run += 1
        try:
            check.run(launcher)
        except Exception as error:  # noqa: BLE001 - recorded; the tool must see the other checks too
            failed.append(f"{check.family}.{check.name}: {str(error)[:200]}")
    print(f"checked {num_run} of {len(checks)}; failed: {'; '.join(failed) or 'none'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
