"""Measures this GPU's ceilings: memory bandwidth and products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock.tools.gpu.devices import device_context
from penstock.tools.gpu.devices.device_context import DeviceContext
from penstock.tools.gpu.items import Item
from penstock.tools.gpu.report import PRODUCT_CEILING, READ_CEILING
from penstock.tools.gpu.results import Results


@dataclass(frozen=True)
class CeilingSizes:
    copy_bytes: int = 1 << 30
    product: int = 8192


def run(results: Results, _item: Item, sizes: CeilingSizes | None = None) -> None:
    context, sizes = device_context.open_device_context(), sizes or CeilingSizes()
    for work in (_memory, _products):
        results.attempt(f"ceiling{work.__name__}", partial(work, results, context, sizes))


def _memory(results: Results, context: DeviceContext, sizes: CeilingSizes) -> None:
    source = torch.empty(sizes.copy_bytes // 4, device=context.torch_device).normal_()
    target = torch.empty_like(source)
    copy_us, read_us = context.clock.work_us([lambda: target.copy_(source)], [lambda: source.sum()])
    results.fact("ceiling.copy", 2 * sizes.copy_bytes / copy_us / 1e6, "TB/s")
    results.fact(READ_CEILING, sizes.copy_bytes / read_us / 1e6, "TB/s")


def _products(results: Results, context: DeviceContext, sizes: CeilingSizes) -> None:
    """Use random data: zeros draw less power, so the clock would be higher than with any model."""
    n, one = sizes.product, torch.ones((), device=context.torch_device)
    a, b = (torch.randn(n, n, device=context.torch_device).bfloat16() for _ in range(2))
    a8, b8 = (x.to(torch.float8_e4m3fn) for x in (a, b))
    ai, bi = ((x * 30).to(torch.int8) for x in (a, b))
    out, sums = torch.empty_like(a), torch.empty(n, n, device=context.torch_device, dtype=torch.int32)
    works: dict[str, Callable[[], Tensor]] = {
        PRODUCT_CEILING: lambda: torch.mm(a, b.t(), out=out),
        f"{PRODUCT_CEILING}.int8": lambda: torch._int_mm(ai, bi.t(), out=sums),
    }
    if context.device.compute_capability >= (8, 9):
        works[f"{PRODUCT_CEILING}.fp8"] = lambda: torch._scaled_mm(
            a8, b8.t(), one, one, out_dtype=torch.bfloat16, out=out
        )
    times = context.clock.work_us(*([work] * 20 for work in works.values()))
    for name, us in zip(works, times, strict=True):
        results.fact(name, 2 * n**3 / us / 1e6, "TFLOP/s")
