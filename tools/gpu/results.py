"""A section's findings, written to a file line by line as they are found, so that a killed section loses none."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZES_PREFIX = "sizes."
DEADLINE_VARIABLE = "PENSTOCK_GPU_CHECK_UNTIL_S"
"""Environment variable: when a section's process must end, in seconds of the monotonic clock.

All processes share that clock.
"""
MATCH_VARIABLE = "PENSTOCK_GPU_CHECK_MATCH"
"""Environment variable: a regular expression that the names of kernels' checks and cases must contain."""
CHOICES_VARIABLE = "PENSTOCK_GPU_CHECK_CHOICES"
"""Environment variable: a file of kernel settings to measure instead of those of this GPU model."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure, fact or check. passed is None for facts and figures."""

    name: str
    value: float | int | str | None
    unit: str = ""
    passed: bool | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SectionOutcome:
    """A section's findings, and how it ended: "done", "running", "timed out", "skipped" or "failed with status N"."""

    name: str
    outcome: str
    wall_s: float
    findings: list[Finding]

    @property
    def passed(self) -> bool:
        return self.outcome in ("done", "skipped") and all(finding.passed is not False for finding in self.findings)


class SectionOver(Exception):
    """The device is lost, so this process can measure nothing more. Findings so far stay valid."""


class Results:
    """One section's findings. The section's process, and processes of its shares, append whole lines to the file."""

    def __init__(self, path: Path, budget_s: float, device_fault: Callable[[], str | None] = lambda: None) -> None:
        """device_fault is called after a failure; it returns the device's error, or None if the device works."""
        self.path = path
        self._deadline_s = time.monotonic() + budget_s
        self._device_fault = device_fault
        self.num_failed = 0

    @property
    def remaining_s(self) -> float:
        """Seconds left of the section's time. Below 0 the section should end by itself."""
        return self._deadline_s - time.monotonic()

    def fact(self, name: str, value: float | int | str, unit: str = "", detail: str = "") -> None:
        self._write(Finding(name, value, unit, None, detail))

    def sizes(self, of: str, described: str) -> None:
        """Record sizes that the figures' names omit."""
        self.fact(f"{SIZES_PREFIX}{of}", described)

    def check(self, name: str, passed: bool, detail: str = "", value: float | int | str | None = None) -> None:
        """Record a check. One failed check fails the whole run."""
        self.num_failed += not passed
        self._write(Finding(name, value, "", passed, detail))

    def skipped(self, name: str, reason: str) -> None:
        self._write(Finding(name, None, "", None, f"not measured: {reason}"))

    def attempt(self, name: str, work: Callable[[], object], needs_s: float = 0.0) -> bool:
        """Run one measurement, which records its own findings. Return whether it ended without an error.

        An error is recorded as a failed check of this name, and the section continues. The measurement is skipped if at
        most needs_s seconds are left. Raises SectionOver if the device is lost.
        """
        if self.remaining_s <= needs_s:
            self.skipped(name, f"only {max(self.remaining_s, 0):.0f} s were left")
            return False
        try:
            work()
        except SectionOver:
            raise
        except Exception as error:
            self.check(name, False, describe(error))
            if (fault := self._device_fault()) is not None:
                self.check("device", False, fault)
                raise SectionOver(fault) from error
            return False
        return True

    def _write(self, finding: Finding) -> None:
        line = json.dumps({name: getattr(finding, name) for name in Finding.__slots__})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        mark = {True: "ok    ", False: "FAILED", None: "      "}[finding.passed]
        shown = f"{finding.value:.6g}" if isinstance(finding.value, float) else str(finding.value)
        print(f"  {mark} {finding.name}: {shown} {finding.unit} {finding.detail}".rstrip(), flush=True)


def is_wanted(name: str) -> bool:
    """Whether the run is of this check or case of a kernel: of all, unless `--match` was given."""
    return re.search(os.environ.get(MATCH_VARIABLE, ""), name) is not None


def describe(error: Exception) -> str:
    """One line: the error's type, its message, and the file and line that raised it."""
    trace, where = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        where = f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {message[:300]} ({where})"


def read_findings(path: Path) -> list[Finding]:
    """Read the complete lines of a section's file: a kill may cut off the last one. An absent file has none."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    fields: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [Finding(**each) for each in fields]
