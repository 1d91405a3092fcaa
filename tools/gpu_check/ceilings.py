"""What this GPU gives at most: the denominators of every other figure."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from tools.gpu_check.timing import graph_us

if TYPE_CHECKING:
    from tools.gpu_check.results import Results

_COPY_BYTES = 1 << 30
_PRODUCT_SIZE = 8192
_GRAPH_NODES = 300
_LINK_BYTES = 256 << 20


def run(results: Results) -> None:
    _copy(results)
    _products(results)
    _launch_gap(results)
    _host_link(results)


def _copy(results: Results) -> None:
    source = torch.empty(_COPY_BYTES // 4, device="cuda").normal_()
    target = torch.empty_like(source)
    us = graph_us([lambda: target.copy_(source)])
    results.fact("ceiling.copy", 2 * _COPY_BYTES / us / 1e6, "TB/s")
    us = graph_us([lambda: source.sum()])
    results.fact("ceiling.read", _COPY_BYTES / us / 1e6, "TB/s")


def _products(results: Results) -> None:
    """On random data: zeros draw less power, and so clock higher than any model will."""
    a = torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    us = graph_us([lambda: torch.matmul(a, b.T, out=out)], min_us=200_000)
    results.fact("ceiling.product", 2 * _PRODUCT_SIZE**3 / us / 1e6, "TFLOP/s")
    for rows in (1, 8, 64):
        weights = [torch.randn(14336, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
        y = torch.empty(rows, 14336, device="cuda", dtype=torch.bfloat16)
        us = graph_us([partial(torch.matmul, x, weight.T, out=y) for weight in weights])
        results.fact(f"ceiling.weights_read.{rows}_rows", weights[0].numel() * 2 / us / 1e6, "TB/s")


def _launch_gap(results: Results) -> None:
    cell = torch.zeros(1, device="cuda")

    def chain() -> None:
        for _ in range(_GRAPH_NODES):
            cell.add_(1.0)

    results.fact("ceiling.graph_node", graph_us([chain]) / _GRAPH_NODES, "us")
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    chain()
    results.fact("ceiling.eager_launch", (time.perf_counter() - started_s) / _GRAPH_NODES * 1e6, "us")
    torch.cuda.synchronize()


def _host_link(results: Results) -> None:
    host = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(_LINK_BYTES, dtype=torch.uint8, device="cuda")
    for name, target, source in (("to_device", device, host), ("to_host", host, device)):
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        results.fact(f"link.{name}", _LINK_BYTES / (time.perf_counter() - started_s) / 1e9, "GB/s")
    small = torch.empty(1024, dtype=torch.uint8, pin_memory=True)
    started_s = time.perf_counter()
    for _ in range(100):
        small.copy_(device[:1024], non_blocking=True)
        torch.cuda.synchronize()
    results.fact("link.round_trip_1k", (time.perf_counter() - started_s) * 1e4, "us")
