"""Writes report.json and report.md: goals with measured values, the comparison with a baseline, all findings."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from penstock.backend.passes.decoder.cuda.device.kernel_choices import FILE_NAME
from penstock.tools.gpu_check.reporting.choices import text_of_run
from penstock.tools.gpu_check.reporting.goals import GOALS, Goal
from penstock.tools.gpu_check.reporting.results import SIZES_PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from penstock.tools.gpu_check.reporting.baseline import FigureComparison
    from penstock.tools.gpu_check.reporting.results import SectionOutcome

NOT_MEASURED = "not measured"
MISS = 0.20
_MOST_FAILED, _MOST_OTHERS, _MOST_COMPARED = 12, 80, 40
"""Maximum lines in report.md, per section and for the comparison; report.json has everything."""

CEILINGS = {"TB/s": "ceiling.copy", "TFLOP/s": "ceiling.product"}
"""Unit → finding of the ceiling; figures are also shown as a share of it if the run measured it."""


def write_report(
    directory: Path,
    outcomes: list[SectionOutcome],
    environment: dict[str, str],
    compared: Sequence[FigureComparison] = (),
    predicted: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Rewrite both files. Called after each progress, so a killed run leaves what it had measured.

    predicted: values by finding, made before the run.
    """
    measured = _measured(outcomes)
    document: dict[str, Any] = {
        "environment": environment,
        "goals": [_goal_row(goal, measured, predicted) for goal in GOALS],
        "predictions": [
            {
                "finding": name,
                "predicted": value,
                "measured": measured[name],
                "missed": is_missed(value, measured[name]),
            }
            for name, value in predicted.items()
            if name in measured
        ],
        "ceilings": {unit: measured[name] for unit, name in CEILINGS.items() if measured.get(name, 0) > 0},
        "compared": [{**asdict(each), "verdict": each.verdict} for each in compared],
        "sections": [{**asdict(outcome), "passed": outcome.passed} for outcome in outcomes],
    }
    _replace(directory / "report.json", json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    _replace(directory / "report.md", _markdown(document))
    if (choices := text_of_run(outcomes, environment)) is not None:
        _replace(directory / FILE_NAME, choices)


def summary_lines(outcomes: list[SectionOutcome]) -> list[str]:
    """The end of the console output: measured goals, failed checks, how each section ended."""
    measured = _measured(outcomes)
    lines = ["", "goals"]
    for row in (_goal_row(goal, measured, {}) for goal in GOALS):
        if row["met"] is not None:
            mark = "pass" if row["met"] else "FAIL"
            lines.append(f"  {mark} {row['title']}: {row['measured']:,.4g} {row['unit']} (goal {row['goal']})")
    lines.append(f"  {sum(goal.finding not in measured for goal in GOALS)} of {len(GOALS)} {NOT_MEASURED}")
    lines += _at_most(
        _MOST_FAILED,
        [
            f"FAILED {outcome.name}: {finding.name} {finding.detail}"
            for outcome in outcomes
            for finding in outcome.findings
            if finding.passed is False
        ],
    )
    lines += [f"{outcome.name}: {outcome.outcome}, {outcome.wall_s:.0f} s" for outcome in outcomes]
    return lines


def _measured(outcomes: list[SectionOutcome]) -> dict[str, float]:
    return {
        finding.name: float(finding.value)
        for outcome in outcomes
        for finding in outcome.findings
        if isinstance(finding.value, int | float)
    }


def is_missed(predicted: float, measured: float) -> bool:
    """Whether the measurement is over 20 % from the prediction, on either side: something was not understood."""
    return not (1 - MISS) * predicted <= measured <= (1 + MISS) * predicted


def _goal_row(goal: Goal, measured: dict[str, float], predicted: Mapping[str, float]) -> dict[str, Any]:
    value = measured.get(goal.finding)
    return {
        "finding": goal.finding,
        "title": goal.title,
        "unit": goal.unit,
        "goal": f"{'≥' if goal.at_least else '≤'} {goal.goal:,g}",
        "limit": goal.limit,
        "predicted": predicted.get(goal.finding),
        "measured": NOT_MEASURED if value is None else value,
        "met": None if value is None else goal.is_met(value),
    }


def _markdown(document: dict[str, Any]) -> str:
    lines = ["# GPU check", ""]
    lines += [f"* {name}: {value}" for name, value in document["environment"].items()]
    lines += ["", "| goal | unit | limit | goal | predicted | measured | |", "|---|---|---|---|---|---|---|"]
    for row in document["goals"]:
        shown = row["measured"] if isinstance(row["measured"], str) else f"{row['measured']:,.4g}"
        mark = {True: "pass", False: "fail", None: ""}[row["met"]]
        predicted = "" if row["predicted"] is None else f"{row['predicted']:,.3g}"
        cells = (row["title"], row["unit"], row["limit"], row["goal"], predicted, shown, mark)
        lines.append(_row(cells))
    lines += _missed_lines(document["predictions"])
    lines += _comparison_lines(document["compared"])
    for section in document["sections"]:
        lines += ["", f"## {section['name']}: {section['outcome']}, {section['wall_s']:.0f} s", ""]
        failed = [_shown(finding, {}) for finding in section["findings"] if finding["passed"] is False]
        lines += _at_most(_MOST_FAILED, failed)
        lines += _at_most(_MOST_OTHERS, _lines_of_others(section["findings"], document["ceilings"]))
    return "\n".join(lines) + "\n"


def _missed_lines(predictions: list[dict[str, Any]]) -> list[str]:
    rows = [
        (
            each["finding"], f"{each['predicted']:,.3g}", f"{each['measured']:,.4g}",
            f"{each['measured'] / each['predicted']:.2f}",
        )
        for each in predictions
        if each["missed"]
    ]  # fmt: skip
    header = ("figure", "predicted", "measured", "measured / predicted")
    return _table_of("Missed by over 20 %", header, rows, f"{len(predictions)} predictions") if predictions else []


def _comparison_lines(compared: list[dict[str, Any]]) -> list[str]:
    """The comparison, worst first. Figures with the verdict "ok" are left out."""
    rows = [
        (
            each["name"], each["unit"], f"{each['before']:,.5g}", f"{each['now']:,.5g}",
            f"{each['worse_percent']:.1f} %", each["verdict"],
        )
        for each in compared
        if each["verdict"] != "ok"
    ]  # fmt: skip
    header = ("figure", "unit", "before", "now", "worse by", "")
    return _table_of("Worse than the baseline", header, rows, f"{len(compared)} figures") if compared else []


def _table_of(title: str, header: tuple[str, ...], rows: Sequence[tuple[str, ...]], total: str) -> list[str]:
    """A section that says how many of the total are rows, and has a table of them if there are any."""
    lines = ["", f"## {title}: {len(rows)} of {total}", ""]
    if rows:
        lines += [_row(header), "|---" * len(header) + "|"]
    return lines + _at_most(_MOST_COMPARED, [_row(row) for row in rows])


def _row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _lines_of_others(findings: list[dict[str, Any]], ceilings: dict[str, float]) -> list[str]:
    """Lines for the findings that did not fail.

    A fact `a.b` joins the line of the finding `a`, unless both have the same unit: then it is another case.
    """
    shown = [each for each in findings if each["passed"] is not False and not each["name"].startswith(SIZES_PREFIX)]
    units = {each["name"]: each["unit"] for each in shown}

    def line_of(finding: dict[str, Any]) -> str:
        name = str(finding["name"])
        about = name.rpartition(".")[0]
        return about if finding["passed"] is None and units.get(about, finding["unit"]) != finding["unit"] else name

    lines: dict[str, str] = dict.fromkeys(map(line_of, shown), "")
    for finding in shown:
        name, line = finding["name"], line_of(finding)
        if line == name:
            lines[line] = _shown(finding, ceilings) + lines[line]
        else:
            lines[line] += f"; {_shown(finding, ceilings, name[len(line) + 1 :])[2:]}"
    return [line if line.startswith("* ") else f"* {name}{line}" for name, line in lines.items()]


def _shown(finding: dict[str, Any], ceilings: dict[str, float], name: str = "") -> str:
    value, unit = finding["value"], finding["unit"]
    shown = "" if value is None else f"{value:,.5g}" if isinstance(value, float) else str(value)
    has_share = unit in ceilings and shown and finding["name"] != CEILINGS[unit]
    share = f"{100 * value / ceilings[unit]:.0f} % of {CEILINGS[unit]}" if has_share else ""
    mark = {True: "pass", False: "**FAIL**", None: ""}[finding["passed"]]
    parts = (f"{shown} {unit}".strip(), share, mark, finding["detail"])
    return f"* {name or finding['name']}: {' · '.join(part for part in parts if part)}"


def _at_most(count: int, lines: list[str]) -> list[str]:
    return lines if len(lines) <= count else [*lines[:count], f"* … {len(lines) - count} more in report.json"]


def _replace(path: Path, text: str) -> None:
    """Replace the file atomically."""
    draft = path.with_suffix(path.suffix + ".new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
