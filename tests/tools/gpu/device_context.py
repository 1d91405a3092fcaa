"""A `DeviceContext` without a GPU: the emulated device, the host's clock, and a memory counter with constants."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.tools.gpu.devices.device_context import DeviceContext
from penstock.tools.gpu.results import Finding, Results, read_findings
from tests.backend.passes.cuda.emulated_device import EmulatedDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class HostClock:
    """Times work with the host's clock. `work_us` runs each variant twice, as a graph replay repeats work."""

    def work_us(self, variants: Sequence[Callable[[], object]]) -> float:
        started_s = time.perf_counter()
        for variant in variants:
            variant()
            variant()
        return (time.perf_counter() - started_s) * 1e6 / (2 * len(variants))

    def once_us(self, work: Callable[[], object]) -> float:
        started_s = time.perf_counter()
        work()
        return (time.perf_counter() - started_s) * 1e6


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
    """A section's results and the findings it recorded."""

    def __init__(self, directory: Path, budget_s: float = 600.0) -> None:
        self._path = directory / "findings.jsonl"
        self.results = Results(self._path, budget_s)

    def findings(self) -> dict[str, Finding]:
        """Findings by name. Raises AssertionError if one failed."""
        found = read_findings(self._path)
        failed = [(finding.name, finding.detail) for finding in found if finding.passed is False]
        if failed:
            raise AssertionError(failed)
        return {finding.name: finding for finding in found}
