"""Runs each section in a process of its own with its own time limit, so a fault or a hang ends only that section."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.process.cache_directory import CUBINS_VARIABLE
from penstock.tools.gpu_check.prediction.predictions import predicted_values
from penstock.tools.gpu_check.reporting import baseline
from penstock.tools.gpu_check.reporting.environment import describe_environment
from penstock.tools.gpu_check.reporting.processes import device_fault, die_with_parent
from penstock.tools.gpu_check.reporting.report import summary_lines, write_report
from penstock.tools.gpu_check.reporting.results import (
    DEADLINE_VARIABLE,
    Finding,
    Results,
    SectionOutcome,
    SectionOver,
    read_findings,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.tools.gpu_check.kept_findings import KeptFindings
    from penstock.tools.gpu_check.reporting.baseline import Baseline, FigureComparison


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the run. `module` has a function `run(results)`, or one of the name in `run`.

    A run's time is shared among its sections in proportion to budget_s.
    """

    name: str
    module: str
    budget_s: float
    part: str = ""
    """A part of the whole check that one command of at most nine minutes runs: `PARTS`."""
    run: str = "run"
    needs_peers: bool = False
    """Skip the section without `--peers`, unless `--only` names it."""


SECTIONS = (
    # Includes the first import of torch, which reads it from the disk.
    Section("environment", "penstock.tools.gpu_check.reporting.environment", 30, "a"),
    Section("compile", "penstock.tools.gpu_check.checks.compilation", 35, "a"),
    Section("ceilings", "penstock.tools.gpu_check.kernel_speed.ceilings", 20, "a"),
    Section("correctness", "penstock.tools.gpu_check.checks.correctness", 90, "a"),
    Section("kernels", "penstock.tools.gpu_check.kernel_speed.kernels", 70, "b"),
    Section("variants", "penstock.tools.gpu_check.kernel_speed.variants", 60, "b"),
    Section("attribution", "penstock.tools.gpu_check.engine_speed.attribution", 45, "c"),
    Section("end-to-end", "penstock.tools.gpu_check.engine_speed.end_to_end", 110, "c"),
    Section("invariance", "penstock.tools.gpu_check.checks.invariance", 50, "d"),
    Section("sharing", "penstock.tools.gpu_check.checks.sharing", 15, "a"),
    Section("nano-vllm", "penstock.tools.gpu_check.engine_speed.nano_vllm", 80, "d", needs_peers=True),
    Section("peers", "penstock.tools.gpu_check.engine_speed.transformers_batching", 65, "d"),
    Section("sanitizer", "penstock.tools.gpu_check.checks.sanitizer", 75, "d"),
)
"""Most important first: a section that takes longer than its share takes time from the later ones."""
QUICK_SECTIONS = (
    Section("compile", "penstock.tools.gpu_check.checks.compilation", 40),
    Section("correctness", "penstock.tools.gpu_check.checks.correctness", 70, run="run_quick"),
    Section("kernels", "penstock.tools.gpu_check.kernel_speed.kernels", 40, run="run_quick"),
)
"""Sections for kernel tuning: they show whether the result is still correct, and how fast the kernel is."""
TOTAL_S = sum(section.budget_s for section in SECTIONS if not section.needs_peers)
QUICK_S = sum(section.budget_s for section in QUICK_SECTIONS)
COMPILE_ONLY_S = 1800.0
PARTS = tuple(dict.fromkeys(sorted(section.part for section in SECTIONS)))
PART_S = 520.0
"""Seconds of a part: with the end of its last section and the report it ends within nine minutes."""
_GRACE_S = 8.0
_REPORT_EVERY_S = 5.0
"""Seconds between report updates while a section runs: a killed run writes no report at its end."""


@dataclass(frozen=True, slots=True)
class Run:
    """Options of a whole run. peers: directory with the packages to measure beside ours."""

    out: Path
    budget_s: float
    sections: tuple[Section, ...]
    cubins: Path | None = None
    """Directory of compiled kernels: read on a GPU, written without one."""
    peers: Path | None = None
    commit: str = ""
    before: Baseline | None = None
    save_to: Path | None = None
    """File for the next baseline, written if the run passes."""
    kept: KeptFindings | None = None
    """Findings of earlier commands with the same directory: sections that are done are not repeated."""


def choose_sections(sections: tuple[Section, ...], only: frozenset[str], peers: Path | None) -> tuple[Section, ...]:
    if only:
        return tuple(section for section in sections if section.name in only)
    return tuple(section for section in sections if peers is not None or not section.needs_peers)


def run_all(run: Run) -> int:
    """Run the sections in order. Returns the exit status: 0 only if every check of every section passed.

    Time that a section leaves unused goes to the later ones.
    """
    ends_s = time.monotonic() + run.budget_s
    environment = describe_environment(run.commit)
    predicted = predicted_values(environment.get("gpu", ""))
    ended = run.kept.load_all(section.name for section in SECTIONS) if run.kept else {}
    left = [section for section in run.sections if section.name not in ended or ended[section.name].outcome != "done"]
    for index, section in enumerate(left):
        share = section.budget_s / sum(other.budget_s for other in left[index:])
        seconds = (ends_s - time.monotonic() - _GRACE_S) * share
        print(f"{section.name} ({seconds:.0f} s)", flush=True)

        def on_progress(found: SectionOutcome) -> None:
            ended[found.name] = found
            write_report(run.out, _in_order(ended), environment, predicted=predicted)

        outcome = _run_child(section, run, seconds, on_progress)
        if run.kept is not None:
            run.kept.save(outcome)
        on_progress(outcome)
    outcomes = _in_order(ended)
    if not left:
        write_report(run.out, outcomes, environment, predicted=predicted)
    measured = baseline.make_baseline(outcomes, environment)
    if run.before is not None:
        compared, outcome = _compare(run.before, measured)
        outcomes.append(outcome)
        write_report(run.out, outcomes, environment, compared, predicted)
    print("\n".join(summary_lines(outcomes)))
    failed = [outcome.name for outcome in outcomes if not outcome.passed]
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} sections passed; {run.out / 'report.md'}")
    if failed:
        print(f"failed: {', '.join(failed)}", flush=True)
    # Figures worse than the old baseline may still be saved: that is what a new baseline is for.
    is_saved = run.save_to is None or _save(
        run.save_to, measured, [name for name in failed if name != baseline.SECTION]
    )
    return 0 if is_saved and not failed else 1


def _in_order(outcomes: dict[str, SectionOutcome]) -> list[SectionOutcome]:
    places = {section.name: place for place, section in enumerate(SECTIONS)}
    return sorted(outcomes.values(), key=lambda outcome: places.get(outcome.name, len(places)))


def run_section(section: Section, findings: Path, budget_s: float, peers: Path | None) -> int:
    """Run one section in this process, which the kernel kills when its parent ends.

    budget_s applies only if DEADLINE_VARIABLE is not set.
    """
    if DEADLINE_VARIABLE in os.environ:
        die_with_parent()
    until_s = float(os.environ.get(DEADLINE_VARIABLE, time.monotonic() + budget_s))
    if peers is not None:
        sys.path.append(str(peers))
    results = Results(findings, until_s - time.monotonic(), device_fault)
    try:
        results.attempt(section.name, lambda: getattr(importlib.import_module(section.module), section.run)(results))
    except SectionOver as over:
        print(f"  the section stops, the device is lost: {over}", flush=True)
        return 3
    return 0


def _run_child(
    section: Section, run: Run, budget_s: float, on_progress: Callable[[SectionOutcome], None]
) -> SectionOutcome:
    """Run a section in a child process and return what it found.

    on_progress receives the findings so far every few seconds. Unless they are kept, findings travel in a temporary
    file, so that the report's directory holds only the report. A child that is killed leaves its own temporary files:
    they are in the same folder. What a peer started may outlive it, such as torch's compilers; it is killed too, and
    what leaves the child's group may still write while the folder is removed.
    """
    started_s = time.monotonic()
    if budget_s <= 1:
        return SectionOutcome(section.name, "skipped", 0.0, [])
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as scratch:
        path = run.kept.path(section.name) if run.kept else Path(scratch, f"{section.name}.jsonl")
        argv = [sys.executable, "-m", "penstock.tools.gpu_check", "--section", section.name, "--findings", str(path)]
        argv += ["--out", str(run.out)] + (["--peers", str(run.peers)] if run.peers else [])
        argv += ["--quick"] if section in QUICK_SECTIONS else []
        environment = os.environ | {DEADLINE_VARIABLE: str(started_s + budget_s), "PYTHONUNBUFFERED": "1"}
        environment["TMPDIR"] = scratch
        if run.cubins is not None:
            environment.setdefault(CUBINS_VARIABLE, str(run.cubins))
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


def _compare(before: Baseline, measured: Baseline) -> tuple[list[FigureComparison], SectionOutcome]:
    try:
        compared = baseline.compare(before, measured)
        findings = baseline.make_findings(before, measured, compared)
    except baseline.BaselineRefused as refusal:
        compared, findings = [], [Finding(baseline.SECTION, None, "", False, f"refused: {refusal}")]
    return compared, SectionOutcome(baseline.SECTION, "done", 0.0, findings)


def _save(path: Path, measured: Baseline, failed: list[str]) -> bool:
    """Save the baseline unless checks failed: figures of wrong results are worthless. Returns whether it was saved."""
    try:
        if failed:
            raise baseline.BaselineRefused(f"these sections failed: {', '.join(failed)}")
        baseline.save_baseline(path, measured)
    except (baseline.BaselineRefused, OSError) as refusal:
        print(f"the baseline was not saved: {refusal}", flush=True)
        return False
    print(f"saved a baseline of {len(measured.figures)} figures to {path}", flush=True)
    return True
