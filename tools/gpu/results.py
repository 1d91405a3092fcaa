"""The findings of a run, written to a file line by line as they are found, so that a killed process loses none."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DEADLINE_VARIABLE = "PENSTOCK_GPU_CHECK_UNTIL_S"
"""Environment variable: when a process of the run must end, in seconds of the monotonic clock, which all share."""
OTHER_TREE_VARIABLE = "PENSTOCK_GPU_CHECK_AB"
"""Environment variable: another checkout, which is measured beside this one."""
CHECKPOINT_VARIABLE = "PENSTOCK_GPU_CHECK_CHECKPOINT"
"""Environment variable: how the paths of a GGUF file's parts begin."""
BEGUN, DONE, NO_TIME = "running", "done", "not run, too little time was left"
"""States of an item; the others say how it ended."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure, fact or check. passed is None for facts and figures."""

    name: str
    value: float | int | str | None
    unit: str = ""
    passed: bool | None = None
    detail: str = ""
    num_bytes: float = 0.0
    """What the timed work must read and write at least; `flop` likewise. 0 for other findings."""
    flop: float = 0.0


@dataclass(slots=True)
class ItemOutcome:
    """An item's findings, its state, and its seconds of the monotonic clock."""

    name: str
    outcome: str
    begun_s: float
    ended_s: float
    findings: list[Finding]

    @property
    def has_run(self) -> bool:
        return self.outcome != NO_TIME

    @property
    def passed(self) -> bool:
        return self.outcome in (DONE, NO_TIME) and all(finding.passed is not False for finding in self.findings)


class DeviceGone(Exception):
    """The device is lost, so this process can measure nothing more. Findings so far stay valid."""


class Results:
    """The findings of one process. It appends whole lines to its file."""

    def __init__(self, path: Path, budget_s: float, device_fault: Callable[[], str | None] = lambda: None) -> None:
        """device_fault is called after a failure; it returns the device's error, or None if the device works."""
        self._path = path
        self._device_fault = device_fault
        self.until_s = time.monotonic() + budget_s

    @property
    def remaining_s(self) -> float:
        return self.until_s - time.monotonic()

    def note_item(self, name: str, state: str) -> None:
        """Note that an item begins, or how it ended. Findings belong to the item that began last."""
        self._append({"item": name, "state": state, "at_s": time.monotonic()})

    def fact(self, name: str, value: float | int | str, unit: str = "", detail: str = "") -> None:
        self._write(Finding(name, value, unit, None, detail))

    def timed(self, name: str, us: float, num_bytes: float = 0.0, flop: float = 0.0, detail: str = "") -> None:
        """Record a time, and what the work must move and compute: the report compares it with this GPU's ceilings."""
        self._write(Finding(name, us, "us", None, detail, num_bytes, flop))

    def check(self, name: str, passed: bool, detail: str = "", value: float | int | str | None = None) -> None:
        """Record a check. One failed check fails the whole run."""
        self._write(Finding(name, value, "", passed, detail))

    def skipped(self, name: str, reason: str) -> None:
        self._write(Finding(name, None, "", None, f"not measured: {reason}"))

    def attempt(self, name: str, work: Callable[[], object]) -> bool:
        """Run a measurement, which records its own findings, if time is left. Return whether it ended without an error.

        An error is recorded as a failed check of this name, and the item continues. Raises DeviceGone.
        """
        if self.remaining_s <= 0:
            self.skipped(name, "no time was left")
            return False
        try:
            work()
        except DeviceGone:
            raise
        except Exception as error:
            self.check(name, False, describe(error))
            if (fault := self._device_fault()) is not None:
                self.check("device", False, fault)
                raise DeviceGone(fault) from error
            return False
        return True

    def agree(self, name: str, check: Callable[[], tuple[str, float | int | None]]) -> bool:
        """Attempt a check, which raises, or returns what agrees, and by how much or how many."""
        return self.attempt(name, lambda: self.check(name, True, *check()))

    def _write(self, finding: Finding) -> None:
        self._append(asdict(finding))
        mark = {True: "ok    ", False: "FAILED", None: "      "}[finding.passed]
        shown = f"{finding.value:.6g}" if isinstance(finding.value, float) else str(finding.value)
        print(f"  {mark} {finding.name}: {shown} {finding.unit} {finding.detail}".rstrip(), flush=True)

    def _append(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def describe(error: Exception) -> str:
    """One line: the error's type, its message, and the file and line that raised it."""
    trace, where = error.__traceback__, ""
    while trace is not None:
        code = trace.tb_frame.f_code
        where = f"{code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}"
        trace = trace.tb_next
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{type(error).__name__}: {message[:300]} ({where})"


def read_outcomes(path: Path) -> list[ItemOutcome]:
    """Read the complete lines of a process's file: a kill may cut off the last one. An absent file has none."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    outcomes: list[ItemOutcome] = []
    for fields in map(json.loads, lines):
        if "item" not in fields:
            outcomes[-1].findings.append(Finding(**fields))
        elif outcomes and outcomes[-1].outcome == BEGUN:
            outcomes[-1].outcome, outcomes[-1].ended_s = fields["state"], fields["at_s"]
        else:
            outcomes.append(ItemOutcome(fields["item"], fields["state"], fields["at_s"], fields["at_s"], []))
    return outcomes
