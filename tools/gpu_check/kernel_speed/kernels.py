"""The section "kernels": times each kernel case, and other libraries' attention beside it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from penstock.tools.gpu_check.devices.device_context import open_device_context
from penstock.tools.gpu_check.kernel_speed import attention_peers
from penstock.tools.gpu_check.kernel_speed.kernel_cases import KernelSizes, kernel_cases
from penstock.tools.gpu_check.kernel_speed.row_product_cases import row_product_cases

if TYPE_CHECKING:
    from penstock.tools.gpu_check.devices.device_context import DeviceContext
    from penstock.tools.gpu_check.kernel_speed.kernel_cases import KernelCase
    from penstock.tools.gpu_check.reporting.results import Results


def run(results: Results) -> None:
    measure(results, open_device_context(), KernelSizes())


def run_quick(results: Results) -> None:
    """Time our kernels only."""
    measure(results, open_device_context(), KernelSizes(with_peers=False))


def measure(results: Results, context: DeviceContext, sizes: KernelSizes) -> None:
    results.sizes("kernels", sizes.describe())
    for case in (*kernel_cases(sizes), *row_product_cases(sizes)):
        results.attempt(case.name, partial(_time, results, context, case))
    if sizes.with_peers:
        attention_peers.measure(results, context, sizes.heads, cold_bytes=sizes.cold_bytes)


def _time(results: Results, context: DeviceContext, case: KernelCase) -> None:
    prepared = case.prepare(context)
    us = context.clock.work_us(prepared.works)
    if not prepared.unit:
        results.fact(case.name, us, "us", prepared.detail)
        return
    rate = prepared.amount / us / 1e6
    if prepared.leads_with_time:
        results.fact(case.name, us, "us", prepared.detail)
        results.fact(f"{case.name}.bandwidth", rate, prepared.unit)
    else:
        results.fact(case.name, rate, prepared.unit, prepared.detail)
        results.fact(f"{case.name}.time", us, "us")
