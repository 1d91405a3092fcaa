"""Records which kernels ran and when: torch's profiler on a GPU, or a stand-in in tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch._C._autograd import DeviceType


@dataclass(frozen=True, slots=True)
class KernelRun:
    """A kernel or a copy on the device, in microseconds of the device's clock."""

    name: str
    """The kernel's name, without template arguments and parameters."""
    start_us: float
    end_us: float


class Profiler(Protocol):
    def runs(self, work: Callable[[], object]) -> list[KernelRun]:
        """Run the work, wait for the device, and return what ran there, in order."""


class GpuProfiler:
    """Kernels of replayed graphs are seen one by one (CUPTI)."""

    def runs(self, work: Callable[[], object]) -> list[KernelRun]:
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as made:
            work()
            torch.cuda.synchronize()
        runs = [
            KernelRun(short_name(event.name), float(event.time_range.start), float(event.time_range.end))
            for event in made.events() or ()
            if event.device_type == DeviceType.CUDA
        ]
        return sorted(runs, key=lambda run: run.start_us)


def short_name(name: str) -> str:
    """A kernel's name without return type, parameters and template arguments."""
    return name.removeprefix("void ").partition("(")[0].partition("<")[0].strip()
