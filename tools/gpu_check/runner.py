"""Each section in a process of its own, with its own time: one that faults or hangs takes no other with it."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tools.gpu_check.environment import describe_environment
from tools.gpu_check.report import SectionOutcome, summary_lines, write_report
from tools.gpu_check.results import Results, SectionOver, read_findings


@dataclass(frozen=True, slots=True)
class Section:
    """module offers `run(results)`. budget_s is its share of a whole run of TOTAL_S."""

    name: str
    module: str
    budget_s: float


SECTIONS = (
    Section("environment", "tools.gpu_check.environment", 15),
    Section("compile", "tools.gpu_check.compilation", 50),
    Section("ceilings", "tools.gpu_check.ceilings", 20),
    Section("correctness", "tools.gpu_check.correctness", 90),
    Section("kernels", "tools.gpu_check.kernel_speed", 70),
    Section("end-to-end", "tools.gpu_check.end_to_end", 110),
    Section("invariance", "tools.gpu_check.invariance", 50),
    Section("sharing", "tools.gpu_check.sharing", 15),
    Section("peers", "tools.gpu_check.peers", 65),
    Section("sanitizer", "tools.gpu_check.sanitizer", 75),
)
"""The most wanted first: what takes longer than its share takes from those behind it."""
TOTAL_S = sum(section.budget_s for section in SECTIONS)
_GRACE_S = 8.0
_COMPILE_ONLY_S = 1800.0
UNTIL_VARIABLE = "PENSTOCK_GPU_CHECK_UNTIL_S"
"""When a section's process is to have ended, by the monotonic clock, which all processes share."""


def run_all(out: Path, budget_s: float, only: frozenset[str], peers: Path | None = None, commit: str = "") -> int:
    """Runs the sections in order; the exit status is 0 only if every gate of every section passed.

    What a section leaves of its time goes to those behind it. peers: a directory of packages to measure beside ours.
    """
    chosen = [section for section in SECTIONS if not only or section.name in only]
    ends_s = time.monotonic() + budget_s
    environment = describe_environment(commit)
    outcomes: list[SectionOutcome] = []
    for index, section in enumerate(chosen):
        share = section.budget_s / sum(other.budget_s for other in chosen[index:])
        seconds = (ends_s - time.monotonic() - _GRACE_S) * share
        print(f"{section.name} ({seconds:.0f} s)", flush=True)
        outcomes.append(_run_child(section, out, seconds, peers))
        write_report(out, outcomes, environment)
    print("\n".join(summary_lines(outcomes)))
    failed = [outcome.name for outcome in outcomes if not outcome.passed]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} sections passed; {out / 'report.md'}")
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def compile_only(out: Path, commit: str = "") -> int:
    """The one section that needs no GPU."""
    return run_all(out, _COMPILE_ONLY_S, frozenset({"compile"}), commit=commit)


def run_section(name: str, findings: Path, budget_s: float, peers: Path | None) -> int:
    """In the section's own process. budget_s is taken where nobody has set UNTIL_VARIABLE."""
    until_s = float(os.environ.get(UNTIL_VARIABLE, time.monotonic() + budget_s))
    if peers is not None:
        sys.path.append(str(peers))
    section = next(section for section in SECTIONS if section.name == name)
    module = importlib.import_module(section.module)
    results = Results(findings, until_s - time.monotonic(), device_fault)
    try:
        results.attempt(name, lambda: module.run(results))
    except SectionOver as over:
        print(f"  the section ends: {over}", flush=True)
        return 3
    return 0


def device_fault() -> str | None:
    """What waiting for the GPU raises; None where it answers, or nobody uses one."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    try:
        if cupy is not None:
            cupy.cuda.runtime.deviceSynchronize()
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception as fault:  # noqa: BLE001 - a device that cannot be waited for computes no more
        return next(iter(str(fault).splitlines()), type(fault).__name__)
    return None


def _run_child(section: Section, out: Path, budget_s: float, peers: Path | None) -> SectionOutcome:
    """Findings travel by a file beside, so that the report's directory holds nothing but the report."""
    started_s = time.monotonic()
    if budget_s <= 1:
        return SectionOutcome(section.name, "skipped", 0.0, [])
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        path = Path(scratch, f"{section.name}.jsonl")
        argv = [sys.executable, "-m", "tools.gpu_check", "--section", section.name, "--findings", str(path)]
        argv += ["--out", str(out)] + (["--peers", str(peers)] if peers else [])
        environment = os.environ | {UNTIL_VARIABLE: str(started_s + budget_s), "PYTHONUNBUFFERED": "1"}
        child = subprocess.Popen(argv, start_new_session=True, env=environment)
        try:
            status = child.wait(budget_s + _GRACE_S)
            outcome = "done" if status == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            outcome = "timed out"
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        return SectionOutcome(section.name, outcome, time.monotonic() - started_s, read_findings(path))
