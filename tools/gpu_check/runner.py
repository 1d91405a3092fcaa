"""Each section in a process of its own, with its own time: one that faults or hangs takes no other with it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools.gpu_check.environment import describe_environment
from tools.gpu_check.report import SectionOutcome, write_report
from tools.gpu_check.results import Results, read_findings

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Section:
    """module offers `run(results)`. budget_s is its share of a whole run of TOTAL_S."""

    name: str
    module: str
    budget_s: float
    needs_gpu: bool = True


SECTIONS = (
    Section("environment", "tools.gpu_check.environment", 20),
    Section("compile", "tools.gpu_check.compilation", 60, needs_gpu=False),
    Section("ceilings", "tools.gpu_check.ceilings", 20),
    Section("correctness", "tools.gpu_check.correctness", 90),
    Section("invariance", "tools.gpu_check.invariance", 35),
    Section("sanitizer", "tools.gpu_check.sanitizer", 100),
    Section("kernels", "tools.gpu_check.kernel_speed", 70),
    Section("sharing", "tools.gpu_check.sharing", 15),
    Section("end-to-end", "tools.gpu_check.end_to_end", 100),
    Section("peers", "tools.gpu_check.peers", 50),
)
TOTAL_S = sum(section.budget_s for section in SECTIONS)
_GRACE_S = 5.0


def run_all(out: Path, budget_s: float, only: frozenset[str]) -> int:
    """Runs the sections in order; the exit status is 0 only if every gate of every section passed."""
    chosen = [section for section in SECTIONS if not only or section.name in only]
    scale = budget_s / sum(section.budget_s for section in chosen)
    environment = describe_environment()
    outcomes: list[SectionOutcome] = []
    for section in chosen:
        print(f"{section.name}", flush=True)
        outcomes.append(_run_child(section, out, section.budget_s * scale))
        write_report(out, outcomes, environment)
    failed = [outcome.name for outcome in outcomes if not outcome.passed]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} sections passed; {out / 'report.md'}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def compile_only(out: Path) -> int:
    """The one section that needs no GPU."""
    return run_all(out, TOTAL_S * 10, frozenset({"compile"}))


def run_section(name: str, out: Path, budget_s: float) -> int:
    """In the section's own process."""
    section = next(section for section in SECTIONS if section.name == name)
    importlib.import_module(section.module).run(Results(_findings_path(out, name), budget_s))
    return 0


def _findings_path(out: Path, name: str) -> Path:
    return out / f"{name}.jsonl"


def _run_child(section: Section, out: Path, budget_s: float) -> SectionOutcome:
    path = _findings_path(out, section.name)
    path.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "tools.gpu_check", "--section", section.name, "--out", str(out)]
    started_s = time.monotonic()
    child = subprocess.Popen([*argv, "--budget", str(max(10.0, budget_s))], start_new_session=True)
    try:
        status = child.wait(budget_s + _GRACE_S)
        outcome = "done" if status == 0 else f"failed with status {status}"
    except subprocess.TimeoutExpired:
        outcome = "timed out"
    finally:
        if child.poll() is None:
            os.killpg(child.pid, 9)
            child.wait()
    return SectionOutcome(section.name, outcome, time.monotonic() - started_s, read_findings(path))
