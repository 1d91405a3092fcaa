"""Figures of an earlier run, kept in a file, and a run's beside them: slower by a few per cent warns, by more it fails.

A figure is compared by its name and unit, and only between devices of one model and on the same sizes.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from penstock.tools.gpu_check.reporting.results import SIZES_PREFIX, Finding

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.tools.gpu_check.reporting.results import SectionOutcome

MORE_IS_BETTER = {"tok/s": True, "TB/s": True, "GB/s": True, "TFLOP/s": True, "us": False, "ms": False}
"""By unit. Seconds are what preparation takes once, which depends on caches on disk: they are not compared."""
WARN_PERCENT, FAIL_PERCENT = 3.0, 7.0
SECTION = "baseline"


class BaselineRefused(Exception):
    """This file is no measure for this run; the message says why."""


@dataclass(frozen=True, slots=True)
class BaselineFigure:
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Baseline:
    """device and commit: what the report calls them. sizes: what the figures' names do not say, by what measured it."""

    device: str
    commit: str
    sizes: dict[str, str]
    figures: dict[str, BaselineFigure]


@dataclass(frozen=True, slots=True)
class FigureComparison:
    name: str
    unit: str
    before: float
    now: float
    worse_percent: float
    """Below 0 it is better."""

    @property
    def verdict(self) -> str:
        if self.worse_percent >= FAIL_PERCENT:
            return "fail"
        return "warn" if self.worse_percent >= WARN_PERCENT else "ok"


def make_baseline(outcomes: list[SectionOutcome], environment: dict[str, str]) -> Baseline:
    """Of what a run has measured so far."""
    findings = [finding for outcome in outcomes if outcome.name != SECTION for finding in outcome.findings]
    sizes = {finding.name: str(finding.value) for finding in findings if finding.name.startswith(SIZES_PREFIX)}
    figures = {
        finding.name: BaselineFigure(float(finding.value), finding.unit)
        for finding in findings
        if finding.unit in MORE_IS_BETTER and isinstance(finding.value, int | float) and _is_ours(finding.name)
        if 0 < finding.value < math.inf
    }
    return Baseline(environment.get("gpu", ""), environment.get("commit", ""), sizes, figures)


def load_baseline(path: Path) -> Baseline:
    """Raises BaselineRefused for a file that cannot be read, or is none."""
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        figures = {
            str(name): BaselineFigure(float(value), str(unit)) for name, (value, unit) in fields["figures"].items()
        }
        sizes = {str(name): str(said) for name, said in fields["sizes"].items()}
        baseline = Baseline(str(fields["device"]), str(fields["commit"]), sizes, figures)
    except OSError as error:
        raise BaselineRefused(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BaselineRefused(f"{path} is no baseline: {type(error).__name__}: {error}") from error
    for name, figure in baseline.figures.items():
        if figure.unit not in MORE_IS_BETTER or not 0 < figure.value < math.inf:
            raise BaselineRefused(f"{path}: {name} is {figure.value:g} {figure.unit}, which cannot be compared")
    return baseline


def save_baseline(path: Path, baseline: Baseline) -> None:
    """Raises BaselineRefused where there is nothing to save."""
    if not baseline.device:
        raise BaselineRefused("the run's device is not known: nvidia-smi does not tell")
    if not baseline.figures:
        raise BaselineRefused("the run measured nothing that a baseline holds")
    document = asdict(baseline) | {
        "figures": {name: [figure.value, figure.unit] for name, figure in sorted(baseline.figures.items())}
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def require_device(before: Baseline, device: str) -> None:
    """Raises BaselineRefused where the baseline is of another model than device."""
    if before.device != device:
        raise BaselineRefused(f"it is of {before.device or 'no device'}, and this is {device or 'an unknown device'}")


def compare(before: Baseline, now: Baseline) -> list[FigureComparison]:
    """Of the figures on both sides, the worst first. Raises BaselineRefused for another device or other sizes."""
    require_device(before, now.device)
    for name in sorted(before.sizes.keys() & now.sizes.keys()):
        if before.sizes[name] != now.sizes[name]:
            raise BaselineRefused(f"its {name} is {before.sizes[name]!r}, and here it is {now.sizes[name]!r}")
    compared = [
        _compare(name, figure, now.figures[name])
        for name, figure in before.figures.items()
        if name in now.figures and now.figures[name].unit == figure.unit
    ]
    return sorted(compared, key=lambda comparison: (-comparison.worse_percent, comparison.name))


def make_findings(before: Baseline, now: Baseline, compared: list[FigureComparison]) -> list[Finding]:
    """A failed check for each figure that is much worse, and facts for the rest."""
    failed = [each for each in compared if each.verdict == "fail"]
    num_warned = sum(each.verdict == "warn" for each in compared)
    said = (
        f"figures beside those of {before.commit}: {num_warned} worse by {WARN_PERCENT:g} % or more, {len(failed)} by "
    )
    findings = [Finding(f"{SECTION}.compared", len(compared), "", None, f"{said}{FAIL_PERCENT:g} % or more")]
    findings += [
        Finding(
            f"{SECTION}.{each.name}", each.now, each.unit, False,
            f"{each.worse_percent:.1f} % worse than {each.before:,.5g}",
        )
        for each in failed
    ]  # fmt: skip
    same = {each.name for each in compared}
    for side, names in (("only_before", before.figures), ("only_now", now.figures)):
        if absent := sorted(names.keys() - same):
            findings.append(Finding(f"{SECTION}.{side}", ", ".join(absent), "", None, f"{len(absent)} not compared"))
    return findings


def _compare(name: str, before: BaselineFigure, now: BaselineFigure) -> FigureComparison:
    share = 100 * (now.value / before.value - 1)
    return FigureComparison(name, now.unit, before.value, now.value, -share if MORE_IS_BETTER[now.unit] else share)


def _is_ours(name: str) -> bool:
    """A peer's figure, or the profiler's with cold caches, is no measure of a change of ours."""
    return name == "peers.ours" or not name.startswith(("peer.", "peers.", "ncu."))
