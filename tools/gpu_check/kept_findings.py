"""Keeps a run's findings in its directory, so that the same command continues after a kill, and parts add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.tools.gpu_check.reporting.results import SectionOutcome, read_findings

if TYPE_CHECKING:
    from collections.abc import Iterable

_RUN = "run.json"
_SAME = ("gpu", "commit", "torch")
"""Facts of the environment that all parts of a run share."""


class OtherRun(Exception):
    """The directory has findings of another GPU, commit or torch."""


class KeptFindings:
    """The findings of each section, in a file that its process writes, and how the ended sections ended."""

    def __init__(self, out: Path, environment: dict[str, str]) -> None:
        """Raises OtherRun, or OSError if the directory cannot be written."""
        self._directory = out / "findings"
        self._directory.mkdir(parents=True, exist_ok=True)
        now = {name: environment.get(name, "") for name in _SAME}
        path = self._directory / _RUN
        try:
            before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else now
        except ValueError:  # cut off by a kill, before any section began
            before = now
        if before != now:
            raise OtherRun(f"{self._directory} has findings of {before}, and this is {now}: give another --out")
        path.write_text(json.dumps(now) + "\n", encoding="utf-8")

    def path(self, section: str) -> Path:
        return self._directory / f"{section}.jsonl"

    def save(self, outcome: SectionOutcome) -> None:
        ended = {"outcome": outcome.outcome, "wall_s": outcome.wall_s}
        self._ended(outcome.name).write_text(json.dumps(ended) + "\n", encoding="utf-8")

    def load(self, section: str) -> SectionOutcome | None:
        """A section's outcome and findings; None if it has not ended."""
        try:
            ended = json.loads(self._ended(section).read_text(encoding="utf-8"))
            outcome, wall_s = str(ended["outcome"]), float(ended["wall_s"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return SectionOutcome(section, outcome, wall_s, read_findings(self.path(section)))

    def load_all(self, sections: Iterable[str]) -> dict[str, SectionOutcome]:
        found = {section: self.load(section) for section in sections}
        return {section: outcome for section, outcome in found.items() if outcome is not None}

    def _ended(self, section: str) -> Path:
        return self._directory / f"{section}.ended.json"
