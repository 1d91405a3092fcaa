"""report.json and report.md: every goal with what was measured beside it, then each section's findings."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tools.gpu_check.goals import GOALS, Goal

if TYPE_CHECKING:
    from pathlib import Path

    from tools.gpu_check.results import Finding

NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class SectionOutcome:
    """How a section ended: "done", "timed out", "failed" with its exit status, or "skipped", and what it found."""

    name: str
    outcome: str
    wall_s: float
    findings: list[Finding]

    @property
    def passed(self) -> bool:
        return self.outcome in ("done", "skipped") and all(finding.passed is not False for finding in self.findings)


def write_report(directory: Path, outcomes: list[SectionOutcome], environment: dict[str, str]) -> None:
    """Writes both files anew; called after each section, so that what was measured survives any end."""
    measured = _measured(outcomes)
    document: dict[str, Any] = {
        "environment": environment,
        "goals": [_goal_row(goal, measured) for goal in GOALS],
        "sections": [{**asdict(outcome), "passed": outcome.passed} for outcome in outcomes],
    }
    _replace(directory / "report.json", json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    _replace(directory / "report.md", _markdown(document))


def summary_lines(outcomes: list[SectionOutcome]) -> list[str]:
    """For the end of the output: every goal that was measured, and every check that failed."""
    measured = _measured(outcomes)
    lines = ["", "goals"]
    for row in (_goal_row(goal, measured) for goal in GOALS):
        if row["met"] is not None:
            mark = "pass" if row["met"] else "FAIL"
            lines.append(f"  {mark} {row['title']}: {row['measured']:,.4g} {row['unit']} (goal {row['goal']})")
    lines.append(f"  {sum(goal.finding not in measured for goal in GOALS)} of {len(GOALS)} {NOT_MEASURED}")
    lines += [
        f"FAILED {outcome.name}: {finding.name} {finding.detail}"
        for outcome in outcomes
        for finding in outcome.findings
        if finding.passed is False
    ]
    lines += [f"{outcome.name}: {outcome.outcome}, {outcome.wall_s:.0f} s" for outcome in outcomes]
    return lines


def _measured(outcomes: list[SectionOutcome]) -> dict[str, float]:
    return {
        finding.name: float(finding.value)
        for outcome in outcomes
        for finding in outcome.findings
        if isinstance(finding.value, int | float)
    }


def _goal_row(goal: Goal, measured: dict[str, float]) -> dict[str, Any]:
    value = measured.get(goal.finding)
    return {
        "finding": goal.finding,
        "title": goal.title,
        "unit": goal.unit,
        "goal": f"{'≥' if goal.at_least else '≤'} {goal.goal:,g}",
        "limit": goal.limit,
        "measured": NOT_MEASURED if value is None else value,
        "met": None if value is None else goal.is_met(value),
    }


def _markdown(document: dict[str, Any]) -> str:
    lines = ["# GPU check", ""]
    lines += [f"* {name}: {value}" for name, value in document["environment"].items()]
    lines += ["", "| goal | unit | limit | goal | measured | |", "|---|---|---|---|---|---|"]
    for row in document["goals"]:
        shown = row["measured"] if isinstance(row["measured"], str) else f"{row['measured']:,.4g}"
        mark = {True: "pass", False: "fail", None: ""}[row["met"]]
        lines.append(f"| {row['title']} | {row['unit']} | {row['limit']} | {row['goal']} | {shown} | {mark} |")
    for section in document["sections"]:
        lines += ["", f"## {section['name']}: {section['outcome']}, {section['wall_s']:.0f} s", ""]
        for finding in section["findings"]:
            value = finding["value"]
            shown = "" if value is None else f"{value:,.5g}" if isinstance(value, float) else str(value)
            mark = {True: "pass", False: "**FAIL**", None: ""}[finding["passed"]]
            parts = (f"{shown} {finding['unit']}".strip(), mark, finding["detail"])
            lines.append(f"* {finding['name']}: {' · '.join(part for part in parts if part)}")
    return "\n".join(lines) + "\n"


def _replace(path: Path, text: str) -> None:
    """Whole or not at all."""
    draft = path.with_suffix(path.suffix + ".new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
