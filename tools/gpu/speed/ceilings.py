"""Measures this GPU's ceilings: memory bandwidth, products, launches and the host link."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

import torch

from penstock.backend.passes.cuda.device.link_probe import measure_link
from penstock.backend.passes.cuda.memory.cache_layout import CacheLayout
from penstock.backend.passes.cuda.memory.page_moves import HostPool
from penstock.tools.gpu.devices.caches import cache_shape, make_page_copier
from penstock.tools.gpu.devices.device_context import DeviceContext, open_device_context
from penstock.tools.gpu.results import Results

_LLAMA_PAGES = CacheLayout(32, 256, 32, 8, 128, "bf16")
"""The pages of a Llama 8B, 1 GB."""


@dataclass(frozen=True)
class CeilingSizes:
    copy_bytes: int = 1 << 30
    product: int = 8192
    graph_nodes: int = 300
    link_bytes: int = 256 << 20
    small_bytes: int = 1024
    pages: CacheLayout = _LLAMA_PAGES


def run(results: Results) -> None:
    measure(results, open_device_context(), CeilingSizes())


def measure(results: Results, context: DeviceContext, sizes: CeilingSizes) -> None:
    results.sizes("ceilings", str(sizes))
    for name, work in (("copy", _copy), ("product", _product), ("graph_node", _launch_gap), ("link", _host_link)):
        results.attempt(f"ceiling.{name}", partial(work, results, context, sizes))
    results.attempt("ceiling.pages", partial(_measure_page_copies, results, context, sizes.pages))


def _copy(results: Results, context: DeviceContext, sizes: CeilingSizes) -> None:
    source = torch.empty(sizes.copy_bytes // 4, device=context.torch_device).normal_()
    target = torch.empty_like(source)
    us = context.clock.work_us([lambda: target.copy_(source)])
    results.fact("ceiling.copy", 2 * sizes.copy_bytes / us / 1e6, "TB/s")
    us = context.clock.work_us([lambda: source.sum()])
    results.fact("ceiling.read", sizes.copy_bytes / us / 1e6, "TB/s")


def _product(results: Results, context: DeviceContext, sizes: CeilingSizes) -> None:
    """Use random data: zeros draw less power, so the clock would be higher than with any model."""
    n = sizes.product
    a, b = (torch.randn(n, n, device=context.torch_device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    us = context.clock.work_us([lambda: torch.mm(a, b.t(), out=out)] * 20)
    results.fact("ceiling.product", 2 * n**3 / us / 1e6, "TFLOP/s")


def _launch_gap(results: Results, context: DeviceContext, sizes: CeilingSizes) -> None:
    cell = torch.zeros(1, device=context.torch_device)

    def chain() -> None:
        for _ in range(sizes.graph_nodes):
            cell.add_(1.0)

    results.fact("ceiling.graph_node", context.clock.work_us([chain]) / sizes.graph_nodes, "us")
    context.device.synchronize()
    started_s = time.perf_counter()
    chain()
    results.fact("ceiling.eager_launch", (time.perf_counter() - started_s) / sizes.graph_nodes * 1e6, "us")
    context.device.synchronize()


def _host_link(results: Results, context: DeviceContext, sizes: CeilingSizes) -> None:
    speed = measure_link(context.device, sizes.link_bytes)
    results.fact("link.to_device", speed.to_device / 1e9, "GB/s")
    results.fact("link.to_host", speed.to_host / 1e9, "GB/s")
    on_device = torch.zeros(sizes.small_bytes, dtype=torch.uint8, device=context.torch_device)
    on_host = context.device.pinned(sizes.small_bytes, torch.uint8)
    started_s = time.perf_counter()
    for _ in range(100):
        on_host.copy_(on_device, non_blocking=True)
        context.device.synchronize()
    results.fact("link.round_trip_1k", (time.perf_counter() - started_s) * 1e4, "us")


def _measure_page_copies(results: Results, context: DeviceContext, layout: CacheLayout) -> None:
    """Copy a whole cache with the copy kernel; compare with `link.to_host` and `link.to_device`."""
    cache = torch.randint(0, 256, cache_shape(layout), dtype=torch.uint8, device=context.torch_device)
    pool = HostPool(context.device, layout, layout.num_pages)
    try:
        pairs = (
            torch.arange(layout.num_pages, dtype=torch.int32, device=context.torch_device)
            .repeat_interleave(2)
            .view(-1, 2)
        )
        copy = make_page_copier(context)
        for name, source, destination in (("save", cache, pool.pages), ("restore", pool.pages, cache)):
            us = context.clock.work_us([partial(copy, source, destination, pairs)])
            results.fact(f"link.pages.{name}", layout.num_bytes / us / 1e3, "GB/s", "by a kernel, page by page")
    finally:
        context.device.synchronize()
        pool.close()
