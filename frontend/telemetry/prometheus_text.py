"""Prometheus' text format, version 0.0.4."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.shm.memory.board import Histogram

    Counters = Mapping[str, int]


class MetricsPage:
    """Families in the order in which they were first added; each has the samples of all sources together."""

    def __init__(self, prefix: str) -> None:
        """prefix begins all names."""
        self._prefix = prefix
        self.labels = ""
        """Labels that are added to those of each sample."""
        self._families: dict[str, list[str]] = {}

    def add(self, name: str, kind: str, help_text: str, samples: Iterable[tuple[str, float]]) -> None:
        lines = self._family(name, kind, help_text)
        lines += [f"{self._prefix}{name}{self._braced(labels)} {value}" for labels, value in samples]

    def add_histogram(
        self, name: str, help_text: str, histogram: Histogram, unit: float, board: Counters, prefix: str = ""
    ) -> None:
        buckets, total = histogram.read(board, prefix)
        lines = self._family(name, "histogram", help_text)
        bounds = [*(f"{bound / unit:g}" for bound in histogram.bounds), "+Inf"]
        for bound, count in zip(bounds, accumulate(buckets), strict=True):
            limit = f'le="{bound}"'
            lines.append(f"{self._prefix}{name}_bucket{self._braced(limit)} {count}")
        labels, full_name = self._braced(""), self._prefix + name
        lines += [f"{full_name}_sum{labels} {total / unit}", f"{full_name}_count{labels} {sum(buckets)}"]

    def text(self) -> bytes:
        return "".join(f"{line}\n" for lines in self._families.values() for line in lines).encode()

    def _family(self, name: str, kind: str, help_text: str) -> list[str]:
        head = [f"# HELP {self._prefix}{name} {help_text}", f"# TYPE {self._prefix}{name} {kind}"]
        return self._families.setdefault(name, head)

    def _braced(self, labels: str) -> str:
        joined = ",".join(part for part in (self.labels, labels) if part)
        return f"{{{joined}}}" if joined else ""


def escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
