"""The section "variants": decode attention with other page sizes and shorter rings, and torch's products by rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.tools.gpu_check.devices.device_context import open_device_context
from penstock.tools.gpu_check.devices.profiling import GpuProfiler
from penstock.tools.gpu_check.kernel_speed import weight_products
from penstock.tools.gpu_check.kernel_speed.kernel_cases import KernelSizes, kernel_cases

if TYPE_CHECKING:
    from penstock.tools.gpu_check.devices.device_context import DeviceContext
    from penstock.tools.gpu_check.reporting.results import Results

_CASES = 2
"""The first cases of decode attention: many rows, and few rows of long contexts."""


def run(results: Results) -> None:
    context = open_device_context()
    measure(results, context, KernelSizes())
    weight_products.measure(results, context, GpuProfiler(), weight_products.WeightSizes())


def variants(sizes: KernelSizes) -> dict[str, dict[str, KernelSizes]]:
    """Sizes by what is chosen, and by the choice."""
    return {
        "page_tokens": {str(tokens): replace(sizes, page_tokens=tokens) for tokens in (16, 32, 64)},
        "shared_percent": {f"{share:.0%}"[:-1]: replace(sizes, shared_share=share) for share in (1.0, 0.8, 0.6)},
    }


def measure(results: Results, context: DeviceContext, sizes: KernelSizes) -> None:
    for chosen, choices in variants(sizes).items():
        results.attempt(f"variant.{chosen}", partial(_compare, results, context, chosen, choices))


def _compare(results: Results, context: DeviceContext, chosen: str, choices: dict[str, KernelSizes]) -> None:
    """Record each choice's times; the fastest is that with the least sum of times, each as a share of the best."""
    times: dict[str, dict[str, float]] = {}
    for choice, sizes in choices.items():
        for case in kernel_cases(sizes)[:_CASES]:
            us = context.clock.work_us(case.prepare(context).works)
            results.fact(f"variant.{chosen}.{choice}.{case.name}", us, "us")
            times.setdefault(case.name, {})[choice] = us
    slowness = {
        choice: sum(by_choice[choice] / min(by_choice.values()) for by_choice in times.values()) / len(times)
        for choice in choices
    }
    best = min(choices, key=slowness.__getitem__)
    shown = ", ".join(f"{choice}: {100 * (value - 1):.1f} % slower than the best" for choice, value in slowness.items())
    results.fact(f"variant.{chosen}", best, "", shown)
