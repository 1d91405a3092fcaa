"""Profiles one kernel case with Nsight Compute: saves its text and its report file, and records the main metrics.

The clocks are not locked. ncu replays each launch once per group of counters, with cold caches.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from glob import glob
from typing import TYPE_CHECKING

from penstock.tools.gpu_check.reporting.environment import describe_environment
from penstock.tools.gpu_check.reporting.report import summary_lines, write_report
from penstock.tools.gpu_check.reporting.results import Results, SectionOutcome, read_findings

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_SEARCH_PATHS = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
_SCALES = {
    "ns": 1e-3,
    "us": 1.0,
    "ms": 1e3,
    "s": 1e6,
    "byte/s": 1e-12,
    "Kbyte/s": 1e-9,
    "Mbyte/s": 1e-6,
    "Gbyte/s": 1e-3,
    "Tbyte/s": 1.0,
}
"""ncu's unit → factor to our unit, microseconds or TB/s. Other units stay as they are. Older versions of ncu write
nsecond and byte/second."""
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(?!selected_)(\w+)(?<!_not_issued)_per_issue_active\.ratio")
_TOP_STALLS = 4


@dataclass(frozen=True)
class Metric:
    """One metric to record. columns: ncu's names for it; the first one present is used."""

    name: str
    unit: str
    columns: tuple[str, ...]


METRICS = (
    Metric("duration", "us", ("gpu__time_duration.sum",)),
    Metric("dram", "TB/s", ("dram__bytes.sum.per_second",)),
    Metric(
        "dram_of_peak",
        "%",
        (
            "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
            "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        ),
    ),
    Metric("sm_of_peak", "%", ("sm__throughput.avg.pct_of_peak_sustained_elapsed",)),
    Metric("registers", "", ("launch__registers_per_thread",)),
    Metric("occupancy", "%", ("sm__warps_active.avg.pct_of_peak_sustained_active",)),
)


class NcuFailed(Exception):
    """ncu failed; the message is ncu's."""


def find_ncu() -> str | None:
    found = shutil.which("ncu")
    return found or next(
        (path for pattern in _SEARCH_PATHS for path in sorted(glob(pattern)) if os.access(path, os.X_OK)), None
    )


def profile_case(out: Path, case: str, budget_s: float, commit: str = "") -> int:
    """Write ncu-CASE.txt, ncu-CASE.ncu-rep and the report. Returns the exit status: 1 if ncu is missing or fails."""
    path = find_ncu()
    if path is None:
        print(
            f"--ncu: Nsight Compute is not installed: no ncu on PATH or at {' or '.join(_SEARCH_PATHS)}",
            file=sys.stderr,
        )
        return 1
    started_s = time.monotonic()
    scratch = out / f"ncu-{case}.jsonl"
    results = Results(scratch, budget_s)
    command = [sys.executable, "-m", "penstock.tools.gpu_check.kernel_speed.ncu_child", case]
    results.attempt(f"ncu.{case}", lambda: profile(results, path, out, case, command))
    outcome = SectionOutcome("ncu", "done", time.monotonic() - started_s, read_findings(scratch))
    scratch.unlink()
    scratch.with_suffix(".attempts").unlink(missing_ok=True)
    write_report(out, [outcome], describe_environment(commit))
    print("\n".join(summary_lines([outcome])))
    return 0 if outcome.passed else 1


def profile(results: Results, path: str, out: Path, case: str, command: Sequence[str]) -> None:
    """Record the case's profile and its metrics. Raises NcuFailed."""
    base = out / f"ncu-{case}"
    recorded = base.with_name(f"{base.name}.ncu-rep")
    options = ["--clock-control", "none", "--profile-from-start", "off", "--set", "full", "--force-overwrite"]
    _run([path, *options, "--export", str(recorded), *command], results.remaining_s)
    shown = [path, "--import", str(recorded), "--page"]
    base.with_name(f"{base.name}.txt").write_text(_run([*shown, "details"], results.remaining_s), encoding="utf-8")
    raw_page = _run([*shown, "raw", "--csv", "--print-units", "base"], results.remaining_s)
    kernels = parse_raw(raw_page)
    if not kernels:
        raise NcuFailed("ncu profiled no kernel")
    for kernel, launches in kernels.items():
        _record(results, f"ncu.{case}.{kernel}", launches)


Launch = dict[str, tuple[str, str]]
"""Column name → value and unit."""


def parse_raw(text: str) -> dict[str, list[Launch]]:
    """Parse `--page raw --csv` into launches by kernel: after other lines come names, units, and a line per launch."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return {}
    names, units, *rows = csv.reader(io.StringIO("\n".join(lines[start:])))
    kernels: defaultdict[str, list[Launch]] = defaultdict(list)
    for row in rows:
        if len(row) == len(names):
            launch = dict(zip(names, zip(row, units, strict=True), strict=True))
            kernels[launch["Kernel Name"][0].partition("(")[0]].append(launch)
    return dict(kernels)


def _record(results: Results, name: str, launches: list[Launch]) -> None:
    for metric in METRICS:
        values = [value for launch in launches if (value := _first_value(launch, metric.columns)) is not None]
        if values:
            detail = f"of {len(values)} launches" if metric.name == "duration" else ""
            results.fact(f"{name}.{metric.name}", statistics.median(values), metric.unit, detail)
        else:
            results.skipped(f"{name}.{metric.name}", f"ncu has no {metric.columns[0]}")
    stalls = _stalls(launches[-1])
    if stalls:
        total = sum(stalls.values()) or 1.0
        most = sorted(stalls, key=lambda reason: -stalls[reason])[:_TOP_STALLS]
        results.fact(f"{name}.stalls", ", ".join(f"{reason} {100 * stalls[reason] / total:.0f} %" for reason in most))
    else:
        results.skipped(f"{name}.stalls", "ncu reports no stall reasons")


def _first_value(launch: Launch, columns: Sequence[str]) -> float | None:
    return next((value for column in columns if (value := _value(launch, column)) is not None), None)


def _value(launch: Launch, column: str) -> float | None:
    """The column's value in our unit; None if the column is absent or not a number."""
    text, unit = launch.get(column, ("", ""))
    try:
        return float(text.replace(",", "")) * _SCALES.get(unit.replace("second", "s"), 1.0)
    except ValueError:  # such as n/a
        return None


def _stalls(launch: Launch) -> dict[str, float]:
    """Stall reason → average number of stalled warps per issued instruction."""
    found = {match[1]: _value(launch, column) for column in launch if (match := _STALL.fullmatch(column))}
    return {reason: value for reason, value in found.items() if value is not None}


def _run(argv: list[str], timeout_s: float) -> str:
    """Run ncu and return its output. Raises NcuFailed for a bad exit status, or for an error line despite status 0."""
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0)
    try:
        output, _ = child.communicate(timeout=max(timeout_s, 1.0))
    except subprocess.TimeoutExpired as error:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise NcuFailed(f"ncu did not end within {max(timeout_s, 1.0):.0f} s") from error
    errors = [line for line in output.splitlines() if line.startswith("==ERROR==")]
    if errors or child.returncode != 0:
        last = "; ".join(errors) or next((line for line in reversed(output.splitlines()) if line.strip()), "no output")
        raise NcuFailed(f"status {child.returncode}: {last.strip()[:400]}")
    return output
