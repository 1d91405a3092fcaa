"""The section "variants": attention with other settings, products of few rows by ours and torch's, torch's by rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from penstock.backend.passes.decoder.cuda.device.kernel_choices import CONSTANTS
from penstock.tools.gpu_check.cases.attention.choices import DECODE_VARIANTS, PREFILL_VARIANTS
from penstock.tools.gpu_check.devices.device_context import open_device_context
from penstock.tools.gpu_check.devices.profiling import GpuProfiler
from penstock.tools.gpu_check.kernel_speed import product_rows, weight_products
from penstock.tools.gpu_check.kernel_speed.kernel_cases import KernelSizes, kernel_cases
from penstock.tools.gpu_check.reporting.choices import record_choice

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backend.passes.decoder.cuda.device.kernel_choices import KernelChoices
    from penstock.tools.gpu_check.devices.device_context import DeviceContext
    from penstock.tools.gpu_check.kernel_speed.kernel_cases import KernelCase
    from penstock.tools.gpu_check.reporting.results import Results

_DECODE_CASES = ("attention.decode.64x1k", "attention.decode.8x4k", "attention.decode.1x1k", "attention.decode.1x32k")
"""Many rows, few rows, and one row of a short and of a long context."""
_PREFILL_CASES = ("attention.prefill.4k", "attention.prefill.1k", "attention.prefill.1k_after_8k")


def run(results: Results) -> None:
    context = open_device_context()
    for plan in product_rows.PLANS:
        results.attempt(f"variant.{plan.setting}", partial(product_rows.measure, results, context, plan))
    measure(results, context, KernelSizes())
    weight_products.measure(results, context, GpuProfiler(), weight_products.WeightSizes())


def measure(results: Results, context: DeviceContext, sizes: KernelSizes) -> None:
    cases = {case.name: case for case in kernel_cases(sizes)}
    for names, variants in ((_DECODE_CASES, DECODE_VARIANTS), (_PREFILL_CASES, PREFILL_VARIANTS)):
        measured = [cases[name] for name in names if name in cases]
        for chosen, choices in variants.items():
            results.attempt(f"variant.{chosen}", partial(_compare, results, context, chosen, choices, measured))


def _compare(
    results: Results,
    context: DeviceContext,
    chosen: str,
    choices: dict[str, KernelChoices],
    cases: Sequence[KernelCase],
) -> None:
    """Record each choice's times, and what they imply."""
    times: dict[str, list[float]] = {}
    for choice, settings in choices.items():
        for case in cases:
            us = context.clock.work_us(case.prepare(replace(context, choices=settings)).works)
            results.fact(f"variant.{chosen}.{choice}.{case.name}", us, "us")
            times.setdefault(choice, []).append(us)
    constant = next(choice for choice, settings in choices.items() if settings == CONSTANTS)
    record_choice(results, chosen, constant, times)
