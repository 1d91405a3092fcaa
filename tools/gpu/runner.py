"""Runs each section in a process of its own with its own time limit, so a fault or a hang ends only that section."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.process.cache_directory import CUBINS_VARIABLE
from penstock.process.children import stop_with_parent
from penstock.tools.gpu.environment import describe_environment, device_fault
from penstock.tools.gpu.report import summary_lines, write_report
from penstock.tools.gpu.results import (
    CHOICES_VARIABLE,
    DEADLINE_VARIABLE,
    MATCH_VARIABLE,
    Results,
    SectionOutcome,
    SectionOver,
    read_findings,
)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the run. `module` has a function `run(results)`.

    A run's time is shared among its sections in proportion to budget_s.
    """

    name: str
    module: str
    budget_s: float


SECTIONS = (
    # Includes the first import of torch, which reads it from the disk.
    Section("environment", "penstock.tools.gpu.environment", 30),
    Section("compile", "penstock.tools.gpu.checks.compilation", 35),
    Section("ceilings", "penstock.tools.gpu.speed.ceilings", 20),
    Section("correctness", "penstock.tools.gpu.checks.correctness", 90),
    Section("kernels", "penstock.tools.gpu.speed.kernels", 90),
    Section("end-to-end", "penstock.tools.gpu.speed.end_to_end", 150),
    Section("invariance", "penstock.tools.gpu.checks.invariance", 50),
    Section("sharing", "penstock.tools.gpu.checks.sharing", 15),
    Section("sanitizer", "penstock.tools.gpu.checks.sanitizer", 75),
)
"""Most important first: a section that takes longer than its share takes time from the later ones."""
COMPILE_ONLY_S = 1800.0
_GRACE_S = 8.0
_REPORT_EVERY_S = 5.0
"""Seconds between report updates while a section runs: a killed run writes no report at its end."""


@dataclass(frozen=True, slots=True)
class Run:
    """Options of a whole run."""

    out: Path
    budget_s: float
    sections: tuple[Section, ...]
    cubins: Path | None = None
    """Directory of compiled kernels: read on a GPU, written without one."""
    commit: str = ""
    choices: Path | None = None
    """A file of kernel settings to measure instead of those of this GPU model."""
    match: str = ""
    """A regular expression for the names of kernels' checks and cases: others do not run."""


def choose_sections(sections: tuple[Section, ...], only: tuple[str, ...]) -> tuple[Section, ...]:
    """The named sections, in this order; without names all."""
    return tuple(section for name in only for section in sections if section.name == name) or sections


def run_all(run: Run) -> int:
    """Run the sections in order. Returns the exit status: 0 only if every check of every section passed.

    Time that a section leaves unused goes to the later ones.
    """
    ends_s = time.monotonic() + run.budget_s
    environment = describe_environment(run.commit)
    outcomes: list[SectionOutcome] = []
    for index, section in enumerate(run.sections):
        share = section.budget_s / sum(other.budget_s for other in run.sections[index:])
        seconds = (ends_s - time.monotonic() - _GRACE_S) * share
        print(f"{section.name} ({seconds:.0f} s)", flush=True)

        def on_progress(found: SectionOutcome) -> None:
            write_report(run.out, [*outcomes, found], environment)

        outcome = _run_child(section, run, seconds, on_progress)
        on_progress(outcome)
        outcomes.append(outcome)
    print("\n".join(summary_lines(outcomes)))
    failed = [outcome.name for outcome in outcomes if not outcome.passed]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} sections passed; {run.out / 'report.md'}")
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def run_section(section: Section, findings: Path, budget_s: float) -> int:
    """Run one section in this process, which `_run_child` started. Returns the exit status.

    budget_s applies only if DEADLINE_VARIABLE is not set.
    """
    if DEADLINE_VARIABLE in os.environ:
        stop_with_parent(signal.SIGKILL)
    until_s = float(os.environ.get(DEADLINE_VARIABLE, time.monotonic() + budget_s))
    results = Results(findings, until_s - time.monotonic(), device_fault)
    try:
        results.attempt(section.name, lambda: importlib.import_module(section.module).run(results))
    except SectionOver as over:
        print(f"  the section stops, the device is lost: {over}", flush=True)
        return 3
    return 0


def _run_child(
    section: Section, run: Run, budget_s: float, on_progress: Callable[[SectionOutcome], None]
) -> SectionOutcome:
    """Run a section in a child process and return what it found.

    on_progress receives the findings so far every few seconds. Findings travel in a temporary file, so that the
    report's directory holds only the report. A child that is killed leaves its own temporary files: they are in the
    same folder. What a section started may outlive it, such as torch's compilers; it is killed too, and what leaves the
    child's group may still write while the folder is removed.
    """
    started_s = time.monotonic()
    if budget_s <= 1:
        return SectionOutcome(section.name, "skipped", 0.0, [])
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as scratch:
        path = Path(scratch, f"{section.name}.jsonl")
        argv = [sys.executable, "-m", "penstock.tools.gpu", "--section", section.name, "--findings", str(path)]
        argv += ["--out", str(run.out)]
        environment = os.environ | {DEADLINE_VARIABLE: str(started_s + budget_s), "PYTHONUNBUFFERED": "1"}
        environment["TMPDIR"] = scratch
        if run.cubins is not None:
            environment.setdefault(CUBINS_VARIABLE, str(run.cubins))
        if run.choices is not None:
            environment[CHOICES_VARIABLE] = str(run.choices)
        environment[MATCH_VARIABLE] = run.match
        # A group, not a session: a signal that ends our session ends the sections too.
        child = subprocess.Popen(argv, process_group=0, env=environment)
        try:
            until_s = started_s + budget_s + _GRACE_S
            status = _wait(child, until_s, lambda: on_progress(_outcome(section, "running", started_s, path)))
            outcome = "timed out" if status is None else "done" if status == 0 else f"failed with status {status}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        return _outcome(section, outcome, started_s, path)


def _wait(child: subprocess.Popen[bytes], until_s: float, on_wait: Callable[[], None]) -> int | None:
    """Return the exit status; None if the child is still running at until_s."""
    while (left_s := until_s - time.monotonic()) > 0:
        try:
            return child.wait(min(left_s, _REPORT_EVERY_S))
        except subprocess.TimeoutExpired:
            on_wait()
    return None


def _outcome(section: Section, outcome: str, started_s: float, path: Path) -> SectionOutcome:
    return SectionOutcome(section.name, outcome, time.monotonic() - started_s, read_findings(path))
