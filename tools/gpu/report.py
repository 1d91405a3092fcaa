"""Writes report.json and report.md: all findings, with each time beside the least that this GPU's ceilings allow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from penstock.tools.gpu.clocks import Sample, in_words
from penstock.tools.gpu.results import Finding, ItemOutcome

_MOST_FAILED, _MOST_OTHERS = 12, 120
"""Maximum lines of a group in report.md; report.json has everything."""
READ_CEILING, PRODUCT_CEILING = "ceiling.read", "ceiling.product"
"""Findings of the item ceilings: TB/s, and TFLOP/s of bf16."""


class Ceilings:
    """What this GPU was measured to read and multiply; without these figures nothing has a limit."""

    def __init__(self, outcomes: Sequence[ItemOutcome]) -> None:
        measured = {finding.name: finding.value for outcome in outcomes for finding in outcome.findings}
        self.read, self.product = (
            float(measured.get(name) or 0) for name in (READ_CEILING, PRODUCT_CEILING)
        )  # TB/s, TFLOP/s

    def least_us(self, finding: Finding) -> float:
        """The least time for a finding's bytes and operations; 0 if it has none, or nothing was measured."""
        if not self.read or not self.product:
            return 0.0
        return max(finding.num_bytes / self.read, finding.flop / self.product) / 1e6


def write_report(
    directory: Path, outcomes: Sequence[ItemOutcome], environment: dict[str, str], samples: Sequence[Sample] = ()
) -> None:
    """Rewrite both files. Called after each progress, so a killed run leaves what it had measured."""
    ceilings = Ceilings(outcomes)
    items = [
        {
            "name": outcome.name,
            "outcome": outcome.outcome,
            "wall_s": outcome.ended_s - outcome.begun_s,
            "findings": [asdict(each) | {"least_us": ceilings.least_us(each)} for each in outcome.findings],
        }
        for outcome in outcomes
    ]
    first_s = min((outcome.begun_s for outcome in outcomes if outcome.has_run), default=0.0)
    clocks = [asdict(sample) | {"at_s": sample.at_s - first_s} for sample in samples]
    document = {"environment": environment, "items": items, "clocks": clocks}
    _replace(directory / "report.json", json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    _replace(directory / "report.md", "\n".join(_markdown(outcomes, environment, list(samples), ceilings)) + "\n")


def summary_lines(outcomes: Sequence[ItemOutcome]) -> list[str]:
    """The end of the console output: failed checks, and items that failed or did not run."""
    failed = [
        f"FAILED {outcome.name}: {finding.name} {finding.detail}"
        for outcome in outcomes
        for finding in outcome.findings
        if finding.passed is False
    ]
    return ["", *_at_most(_MOST_FAILED, failed), *_left_out(outcomes)]


def _left_out(outcomes: Sequence[ItemOutcome]) -> list[str]:
    """One line for each way in which items did not end: how, and their names."""
    others = sorted((outcome.outcome, outcome.name) for outcome in outcomes if outcome.outcome != "done")
    return [f"* {how}: {', '.join(name for _, name in of)}" for how, of in groupby(others, lambda each: each[0])]


def _markdown(
    outcomes: Sequence[ItemOutcome], environment: dict[str, str], samples: list[Sample], ceilings: Ceilings
) -> list[str]:
    lines = ["# GPU check", "", *(f"* {name}: {value}" for name, value in environment.items())]
    if left_out := _left_out(outcomes):
        lines += ["", "## Did not end", "", *left_out]
    for name, members in groupby(
        (outcome for outcome in outcomes if outcome.has_run), lambda outcome: outcome.name.partition(".")[0]
    ):
        group = list(members)
        begun_s, ended_s = group[0].begun_s, max(outcome.ended_s for outcome in group)
        told = [f"{ended_s - begun_s:.0f} s", in_words(samples, begun_s, ended_s)]
        lines += ["", f"## {name}: {', '.join(filter(None, told))}", ""]
        findings = [finding for outcome in group for finding in outcome.findings]
        failed = [_shown(finding, ceilings) for finding in findings if finding.passed is False]
        others = [_shown(finding, ceilings) for finding in findings if finding.passed is not False]
        lines += [*_at_most(_MOST_FAILED, failed), *_at_most(_MOST_OTHERS, others)]
    return lines


def _shown(finding: Finding, ceilings: Ceilings) -> str:
    value, us = finding.value, finding.value if isinstance(finding.value, float) else 0.0
    shown = "" if value is None else f"{value:,.5g}" if isinstance(value, float) else str(value)
    works = ((finding.num_bytes, "TB/s"), (finding.flop, "TFLOP/s"))
    rates = [f"{work / us / 1e6:,.3g} {unit}" for work, unit in works if work and us]
    least_us = ceilings.least_us(finding)
    share = f"{100 * least_us / us:.0f} % of the limit, {least_us:,.4g} us" if least_us and us else ""
    mark = {True: "pass", False: "**FAIL**", None: ""}[finding.passed]
    parts = (f"{shown} {finding.unit}".strip(), *rates, share, mark, finding.detail)
    return f"* {finding.name}: {' · '.join(part for part in parts if part)}"


def _at_most(count: int, lines: list[str]) -> list[str]:
    return lines if len(lines) <= count else [*lines[:count], f"* … {len(lines) - count} more in report.json"]


def _replace(path: Path, text: str) -> None:
    """Replace the file atomically."""
    draft = path.with_suffix(path.suffix + ".new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
