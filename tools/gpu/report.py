"""Writes report.json and report.md: all findings, with each rate as a share of this GPU's own ceiling."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.tools.gpu.results import SIZES_PREFIX, SectionOutcome

_MOST_FAILED, _MOST_OTHERS = 12, 80
"""Maximum lines of a section in report.md; report.json has everything."""
CEILINGS = {"TB/s": "ceiling.copy", "TFLOP/s": "ceiling.product"}
"""Unit → finding of the ceiling; figures are also shown as a share of it if the run measured it."""


def write_report(directory: Path, outcomes: list[SectionOutcome], environment: dict[str, str]) -> None:
    """Rewrite both files. Called after each progress, so a killed run leaves what it had measured."""
    measured = {
        finding.name: finding.value
        for outcome in outcomes
        for finding in outcome.findings
        if isinstance(finding.value, int | float)
    }
    document: dict[str, Any] = {
        "environment": environment,
        "ceilings": {unit: measured[name] for unit, name in CEILINGS.items() if measured.get(name, 0) > 0},
        "sections": [{**asdict(outcome), "passed": outcome.passed} for outcome in outcomes],
    }
    _replace(directory / "report.json", json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    _replace(directory / "report.md", _markdown(document))


def summary_lines(outcomes: list[SectionOutcome]) -> list[str]:
    """The end of the console output: failed checks, and how each section ended."""
    failed = [
        f"FAILED {outcome.name}: {finding.name} {finding.detail}"
        for outcome in outcomes
        for finding in outcome.findings
        if finding.passed is False
    ]
    ends = [f"{outcome.name}: {outcome.outcome}, {outcome.wall_s:.0f} s" for outcome in outcomes]
    return ["", *_at_most(_MOST_FAILED, failed), *ends]


def _markdown(document: dict[str, Any]) -> str:
    lines = ["# GPU check", ""]
    lines += [f"* {name}: {value}" for name, value in document["environment"].items()]
    for section in document["sections"]:
        lines += ["", f"## {section['name']}: {section['outcome']}, {section['wall_s']:.0f} s", ""]
        failed = [_shown(finding, {}) for finding in section["findings"] if finding["passed"] is False]
        lines += _at_most(_MOST_FAILED, failed)
        lines += _at_most(_MOST_OTHERS, _lines_of_others(section["findings"], document["ceilings"]))
    return "\n".join(lines) + "\n"


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
