"""What this GPU gives at most: the denominators of every other figure."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from penstock.backend.passes.decoder.cuda.device.link_probe import measure_link
from penstock.backend.passes.decoder.cuda.kv_cache.cache_layout import CacheLayout
from penstock.tools.gpu_check.devices.device_context import open_lab
from penstock.tools.gpu_check.speed.host_pages import measure_moves

if TYPE_CHECKING:
    from penstock.tools.gpu_check.devices.device_context import Lab
    from penstock.tools.gpu_check.reporting.results import Results


_LLAMA_PAGES = CacheLayout(32, 256, 32, 8, 128, "bf16")
"""Of a Llama 8B, 1 GB."""


@dataclass(frozen=True)
class Sizes:
    copy_bytes: int = 1 << 30
    product: int = 8192
    weight: tuple[int, int] = (14_336, 4096)
    graph_nodes: int = 300
    link_bytes: int = 256 << 20
    small_bytes: int = 1024
    pages: CacheLayout = _LLAMA_PAGES


def run(results: Results) -> None:
    measure(results, open_lab(), Sizes())


def measure(results: Results, lab: Lab, sizes: Sizes) -> None:
    results.sizes("ceilings", str(sizes))
    for name, work in (("copy", _copy), ("product", _products), ("graph_node", _launch_gap), ("link", _host_link)):
        results.attempt(f"ceiling.{name}", partial(work, results, lab, sizes))
    results.attempt("ceiling.pages", partial(measure_moves, results, lab, sizes.pages))


def _copy(results: Results, lab: Lab, sizes: Sizes) -> None:
    source = torch.empty(sizes.copy_bytes // 4, device=lab.at).normal_()
    target = torch.empty_like(source)
    us = lab.clock.work_us([lambda: target.copy_(source)])
    results.fact("ceiling.copy", 2 * sizes.copy_bytes / us / 1e6, "TB/s")
    us = lab.clock.work_us([lambda: source.sum()])
    results.fact("ceiling.read", sizes.copy_bytes / us / 1e6, "TB/s")


def _products(results: Results, lab: Lab, sizes: Sizes) -> None:
    """On random data: zeros draw less power, and so clock higher than any model will."""
    n = sizes.product
    a, b = (torch.randn(n, n, device=lab.at).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    us = lab.clock.work_us([lambda: torch.mm(a, b.t(), out=out)] * 20)
    results.fact("ceiling.product", 2 * n**3 / us / 1e6, "TFLOP/s")
    outputs, inputs = sizes.weight
    weights = [torch.randn(outputs, inputs, device=lab.at).bfloat16() for _ in range(4)]
    for rows in (1, 8, 64, 256):
        x = torch.randn(rows, inputs, device=lab.at).bfloat16()
        y = torch.empty(rows, outputs, device=lab.at, dtype=torch.bfloat16)
        us = lab.clock.work_us([partial(torch.mm, x, weight.t(), out=y) for weight in weights])
        results.fact(f"ceiling.weights_read.{rows}_rows", weights[0].numel() * 2 / us / 1e6, "TB/s")


def _launch_gap(results: Results, lab: Lab, sizes: Sizes) -> None:
    cell = torch.zeros(1, device=lab.at)

    def chain() -> None:
        for _ in range(sizes.graph_nodes):
            cell.add_(1.0)

    results.fact("ceiling.graph_node", lab.clock.work_us([chain]) / sizes.graph_nodes, "us")
    lab.device.synchronize()
    started_s = time.perf_counter()
    chain()
    results.fact("ceiling.eager_launch", (time.perf_counter() - started_s) / sizes.graph_nodes * 1e6, "us")
    lab.device.synchronize()


def _host_link(results: Results, lab: Lab, sizes: Sizes) -> None:
    speed = measure_link(lab.device, sizes.link_bytes)
    results.fact("link.to_device", speed.to_device / 1e9, "GB/s")
    results.fact("link.to_host", speed.to_host / 1e9, "GB/s")
    there = torch.zeros(sizes.small_bytes, dtype=torch.uint8, device=lab.at)
    here = lab.device.pinned(sizes.small_bytes, torch.uint8)
    started_s = time.perf_counter()
    for _ in range(100):
        here.copy_(there, non_blocking=True)
        lab.device.synchronize()
    results.fact("link.round_trip_1k", (time.perf_counter() - started_s) * 1e4, "us")
