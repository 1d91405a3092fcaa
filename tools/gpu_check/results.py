"""What a section finds, written line by line as it finds it, so that a killed section keeps what it had."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure, fact or check. passed is None where there is nothing to pass."""

    name: str
    value: float | int | str | None
    unit: str = ""
    passed: bool | None = None
    detail: str = ""


class Results:
    """One section's findings. Owned by the section's process; the file grows by whole lines."""

    def __init__(self, path: Path, budget_s: float) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._deadline_s = time.monotonic() + budget_s

    @property
    def remaining_s(self) -> float:
        """What is left of the section's time; below 0 it should end by itself."""
        return self._deadline_s - time.monotonic()

    def fact(self, name: str, value: float | int | str, unit: str = "") -> None:
        self._write(Finding(name, value, unit))

    def check(self, name: str, passed: bool, detail: str = "", value: float | str | None = None) -> None:
        """A gate: the whole run fails where one does."""
        self._write(Finding(name, value, "", passed, detail))

    def skipped(self, name: str, reason: str) -> None:
        self._write(Finding(name, None, "", None, f"not measured: {reason}"))

    def _write(self, finding: Finding) -> None:
        line = json.dumps({name: getattr(finding, name) for name in Finding.__slots__})
        self._file.write(line + "\n")
        self._file.flush()
        mark = {True: "ok    ", False: "FAILED", None: "      "}[finding.passed]
        shown = f"{finding.value:.6g}" if isinstance(finding.value, float) else str(finding.value)
        print(f"  {mark} {finding.name}: {shown} {finding.unit} {finding.detail}".rstrip(), flush=True)


def read_findings(path: Path) -> list[Finding]:
    """The whole lines of a section's file; none where it never began."""
    if not path.exists():
        return []
    findings = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            fields: dict[str, Any] = json.loads(line)
        except ValueError:  # cut off by a kill
            break
        findings.append(Finding(**fields))
    return findings
