"""Chooses the kernels' settings from measured times, writes them beside the report, and adopts a report's."""

from __future__ import annotations

import json
from statistics import mean
from typing import TYPE_CHECKING

from penstock.backend.passes.decoder.cuda.device.kernel_choices import (
    ALLOWED,
    FILE_NAME,
    ChoicesRefused,
    choices_text,
    file_of,
    read_choices,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from penstock.tools.gpu_check.reporting.results import Results, SectionOutcome

_LEAST_GAIN = 0.02
"""A choice replaces the constant only if it is faster by this: less may be noise, and constants are tested more."""


def record_choice(
    results: Results, chosen: str, constant: str, times: Mapping[str, Sequence[float]], least_gain: float = _LEAST_GAIN
) -> None:
    """Record the choice with the least mean of its times, each as a share of the best for its case. chosen: a setting,
    or several joined by "+"; a choice's name has their values, joined likewise. times: choice → times by case."""
    best_times = [min(by_case) for by_case in zip(*times.values(), strict=True)]
    slowness = {
        choice: mean(us / best_us for us, best_us in zip(by_case, best_times, strict=True))
        for choice, by_case in times.items()
    }
    best = min(slowness, key=slowness.__getitem__)
    if slowness[constant] <= (1 + least_gain) * slowness[best]:
        best = constant
    shown = ", ".join(f"{choice}: {100 * (value - 1):.1f} % slower than the best" for choice, value in slowness.items())
    for setting, value in zip(chosen.split("+"), best.split("+"), strict=True):
        results.fact(f"variant.{setting}", int(value), "", shown)


def record_smallest(results: Results, setting: str, times: Mapping[int, float], least_gain: float = 0.05) -> None:
    """Record the smallest value that takes at most this much longer than the fastest."""
    best = min(times.values())
    shown = ", ".join(f"{value}: {100 * (time / best - 1):.1f} % slower than the best" for value, time in times.items())
    chosen = min(value for value, time in times.items() if time <= (1 + least_gain) * best)
    results.fact(f"variant.{setting}", chosen, "", shown)


def choices_in(outcomes: Sequence[SectionOutcome]) -> dict[str, int]:
    """The settings that the sections have chosen."""
    values = {finding.name: finding.value for outcome in outcomes for finding in outcome.findings}
    found = {setting: values.get(f"variant.{setting}") for setting in ALLOWED}
    return {setting: value for setting, value in found.items() if isinstance(value, int)}


def adopt(report: Path, directory: Path) -> Path:
    """Copy the choices in a report's directory to the directory where a pass on that GPU model reads them. Return the
    copy's path.

    Raises ChoicesRefused, also if nothing was chosen or the GPU is unknown.
    """
    source = report / FILE_NAME
    if not source.exists():
        raise ChoicesRefused(f"{source} is not there: the sections variants and end-to-end write it")
    read_choices(source)
    try:
        environment = json.loads((report / "report.json").read_text(encoding="utf-8"))["environment"]
        gpu = str(environment["gpu"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ChoicesRefused(f"{report / 'report.json'} does not name the GPU: {error}") from error
    if not gpu:
        raise ChoicesRefused(f"{report / 'report.json'} does not name the GPU: nvidia-smi was missing or failed there")
    target = file_of(gpu, directory)
    try:
        directory.mkdir(exist_ok=True)
        target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise ChoicesRefused(f"{target} cannot be written: {error.strerror}") from error
    return target


def text_of_run(outcomes: Sequence[SectionOutcome], environment: Mapping[str, str]) -> str | None:
    """The text of the file that `adopt` copies; None if nothing was chosen yet."""
    settings, gpu, commit = choices_in(outcomes), environment.get("gpu", ""), environment.get("commit", "")
    return choices_text(settings, f"Chosen by penstock gpu-check on {gpu}, commit {commit}.") if settings else None
