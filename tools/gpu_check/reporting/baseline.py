"""Compares a run with the figures of an earlier run, kept in a file: a slowdown of 3 % warns, one of 7 % fails.

Figures are matched by name and unit, and compared only on the same GPU model and the same sizes.
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
"""Compared units. Seconds are left out: they measure one-time preparation, which depends on caches on disk."""
WARN_PERCENT, FAIL_PERCENT = 3.0, 7.0
SECTION = "baseline"


class BaselineRefused(Exception):
    """The baseline cannot be compared with this run, read or saved; the message says why."""


@dataclass(frozen=True, slots=True)
class BaselineFigure:
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Baseline:
    """Figures of one run by name. device and commit are as in the report; sizes has the recorded sizes by finding."""

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
    """Negative if the figure has improved."""

    @property
    def verdict(self) -> str:
        if self.worse_percent >= FAIL_PERCENT:
            return "fail"
        return "warn" if self.worse_percent >= WARN_PERCENT else "ok"


def make_baseline(outcomes: list[SectionOutcome], environment: dict[str, str]) -> Baseline:
    """Collect our own comparable figures, and the sizes they were measured on."""
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
    """Raises BaselineRefused for a file that cannot be read or is not a baseline."""
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        figures = {
            str(name): BaselineFigure(float(value), str(unit)) for name, (value, unit) in fields["figures"].items()
        }
        sizes = {str(name): str(text) for name, text in fields["sizes"].items()}
        baseline = Baseline(str(fields["device"]), str(fields["commit"]), sizes, figures)
    except OSError as error:
        raise BaselineRefused(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BaselineRefused(f"{path} is not a baseline: {type(error).__name__}: {error}") from error
    for name, figure in baseline.figures.items():
        if figure.unit not in MORE_IS_BETTER or not 0 < figure.value < math.inf:
            raise BaselineRefused(f"{path}: {name} is {figure.value:g} {figure.unit}, which cannot be compared")
    return baseline


def save_baseline(path: Path, baseline: Baseline) -> None:
    """Raises BaselineRefused if the device is unknown or there is no figure to save."""
    if not baseline.device:
        raise BaselineRefused("the GPU's name is unknown: nvidia-smi is missing or failed")
    if not baseline.figures:
        raise BaselineRefused("the run measured no figure that a baseline contains")
    document = asdict(baseline) | {
        "figures": {name: [figure.value, figure.unit] for name, figure in sorted(baseline.figures.items())}
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def require_device(before: Baseline, device: str) -> None:
    """Raises BaselineRefused if the baseline is from another GPU model than device."""
    if before.device != device:
        raise BaselineRefused(
            f"it is from {before.device or 'an unknown GPU'}, and this machine has {device or 'no known GPU'}"
        )


def compare(before: Baseline, now: Baseline) -> list[FigureComparison]:
    """Compare the figures that both sides have; worst first. Raises BaselineRefused for another GPU or other sizes."""
    require_device(before, now.device)
    for name in sorted(before.sizes.keys() & now.sizes.keys()):
        if before.sizes[name] != now.sizes[name]:
            raise BaselineRefused(f"its {name} is {before.sizes[name]!r}, and this run's is {now.sizes[name]!r}")
    compared = [
        _compare(name, figure, now.figures[name])
        for name, figure in before.figures.items()
        if name in now.figures and now.figures[name].unit == figure.unit
    ]
    return sorted(compared, key=lambda comparison: (-comparison.worse_percent, comparison.name))


def make_findings(before: Baseline, now: Baseline, compared: list[FigureComparison]) -> list[Finding]:
    """A failed check for each figure with the verdict "fail"; facts for the summary and for unmatched names."""
    failed = [each for each in compared if each.verdict == "fail"]
    num_warned = sum(each.verdict == "warn" for each in compared)
    summary = (
        f"figures compared with {before.commit}: {num_warned} worse by {WARN_PERCENT:g} % or more, {len(failed)} by "
    )
    findings = [Finding(f"{SECTION}.compared", len(compared), "", None, f"{summary}{FAIL_PERCENT:g} % or more")]
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
    """False for figures of peers and of the profiler (cold caches): they do not measure our changes."""
    return name == "peers.ours" or not name.startswith(("peer.", "peers.", "ncu."))
