"""Takes a step apart: which kernels its time goes to, what they read, and the gaps between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch._C._autograd import DeviceType

from penstock.backend.checkpoint.config.decoder_config import DecoderConfig
from penstock.tools.gpu.results import Results
from penstock.tools.random_weights import weight_shapes

_LONGEST_GAP_US = 20.0
"""A longer gap is between steps: the host was late."""


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


def step_bytes(config: DecoderConfig, num_cached_tokens: int) -> dict[str, float]:
    """What our kernels in bf16 must read at least in a step, by the kernel's name."""
    sizes = {name: 2.0 * outputs * inputs * count for name, (outputs, inputs, count) in weight_shapes(config).items()}
    return {
        "decode_attention": 4.0 * config.num_layers * num_cached_tokens * config.num_kv_heads * config.head_dim,
        "multiply_and_store": sizes["qkv"],
        "multiply_and_add": sizes["o"] + sizes["down"],
        "multiply_and_gate": sizes["gate_up"],
    }


def record(
    results: Results,
    profiler: Profiler,
    name: str,
    work: Callable[[], object],
    num_steps: int,
    num_bytes: dict[str, float],
) -> None:
    """Record each kernel's time in a step, longest first, and the gaps. Raises ValueError if the profiler saw none."""
    work()  # the first steps load and capture
    runs = profiler.runs(work)
    if not runs:
        raise ValueError("the profiler saw no kernel")
    total_us: defaultdict[str, float] = defaultdict(float)
    counts: defaultdict[str, int] = defaultdict(int)
    for run in runs:
        total_us[run.name] += run.end_us - run.start_us
        counts[run.name] += 1
    gaps = gaps_us(runs)
    inside_us = sum(gap for gap in gaps if gap < _LONGEST_GAP_US) / num_steps
    step_us = sum(total_us.values()) / num_steps + inside_us
    results.fact(f"{name}.step", step_us, "us", f"{len(runs) / num_steps:g} kernels and copies")
    results.fact(f"{name}.gaps", inside_us, "us", f"{100 * inside_us / step_us:.1f} % of a step")
    results.fact(f"{name}.late", sum(gap for gap in gaps if gap >= _LONGEST_GAP_US) / num_steps, "us", "between steps")
    for kernel in sorted(total_us, key=lambda kernel: -total_us[kernel]):
        us = total_us[kernel] / num_steps
        detail = f"{100 * us / step_us:.1f} % of a step, {counts[kernel] / num_steps:g} launches"
        results.timed(f"{name}.{kernel}", us, num_bytes.get(kernel, 0.0), detail=detail)


def gaps_us(runs: list[KernelRun]) -> list[float]:
    """Idle times between runs; a kernel that begins early leaves none."""
    gaps, end_us = [], runs[0].end_us
    for _, following in pairwise(runs):
        gaps.append(max(following.start_us - end_us, 0.0))
        end_us = max(end_us, following.end_us)
    return gaps
