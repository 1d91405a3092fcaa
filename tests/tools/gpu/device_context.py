"""A `DeviceContext` without a GPU: the emulated device, the host's clock, and a memory counter with constants."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.tools.gpu.devices.device_context import DeviceContext
from penstock.tools.gpu.results import BEGUN, Finding, Results, read_outcomes
from tests.backend.passes.cuda.emulated_device import EmulatedDevice

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.tools.gpu.devices.timing import Works


class HostClock:
    """Times work with the host's clock. `work_us` runs each work twice, as a graph replay repeats work."""

    def work_us(self, *candidates: Works) -> list[float]:
        times = []
        for works in candidates:
            started_s = time.perf_counter()
            for work in (*works, *works):
                work()
            times.append((time.perf_counter() - started_s) * 1e6 / (2 * len(works)))
        return times


@dataclass
class NoMemoryCounter:
    free: int = 1 << 40

    def reset_peak(self) -> None:
        return

    def peak_bytes(self) -> int:
        return 1

    def free_bytes(self) -> int:
        return self.free


def make_device_context() -> DeviceContext:
    return DeviceContext(EmulatedDevice(), HostClock(), NoMemoryCounter(), EmulatedDevice)


class Record:
    """The results of an item, and the findings that it recorded."""

    def __init__(self, directory: Path, budget_s: float = 600.0) -> None:
        self._path = directory / "findings.jsonl"
        self.results = Results(self._path, budget_s)
        self.results.note_item("item", BEGUN)

    def all(self) -> list[Finding]:
        return read_outcomes(self._path)[0].findings

    def findings(self) -> dict[str, Finding]:
        """Findings by name. Raises AssertionError if one failed."""
        failed = [(finding.name, finding.detail) for finding in self.all() if finding.passed is False]
        if failed:
            raise AssertionError(failed)
        return {finding.name: finding for finding in self.all()}
