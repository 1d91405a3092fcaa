"""Pages in the host's memory: does the copy kernel reach it, how fast, and what does a pass make of that."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from penstock.backend.passes.decoder.cuda.kv_cache import page_copies
from penstock.backend.passes.decoder.cuda.kv_cache.cache_layout import CacheLayout
from penstock.backend.passes.decoder.cuda.kv_cache.host_pool import HostPool
from penstock.tools.gpu_check.cases.comparing import require_same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from penstock.backend.passes.decoder.cuda.forward_pass import CudaDecoderPass
    from penstock.tools.gpu_check.devices.device_context import Lab
    from penstock.tools.gpu_check.reporting.results import Results


def check_pool(results: Results, lab: Lab) -> None:
    """Saved, poisoned and restored elsewhere, pages hold what they held; and the host sees what was saved."""
    layout = CacheLayout(3, 40, 16, 2, 64, "bf16")
    count = layout.num_pages // 2
    cache = torch.randint(0, 256, _shape(layout), dtype=torch.uint8, device=lab.at)
    expected = cache.clone()
    pool = HostPool(lab.device, layout, count)
    try:
        pages = torch.arange(count, dtype=torch.int32, device=lab.at)
        places = pages.flip(0)
        copy = _copier(lab, layout)
        copy(cache, pool.pages, torch.stack([pages, places], dim=1))
        cache[:, :count] = 0xFF
        copy(pool.pages, cache, torch.stack([places, pages + count], dim=1))
        lab.device.synchronize()
        require_same_bits("what the host sees", pool.pages.flip(1), expected[:, :count].cpu())
        require_same_bits("what was restored", cache[:, count : 2 * count].cpu(), expected[:, :count].cpu())
    finally:
        lab.device.synchronize()
        pool.close()
    results.check("sharing.host_pages", True, f"{count} pages there and back by the copy kernel")


def measure_moves(results: Results, lab: Lab, layout: CacheLayout) -> None:
    """Of the whole cache, by the kernel: to be compared with `link.to_host` and `link.to_device`."""
    cache = torch.randint(0, 256, _shape(layout), dtype=torch.uint8, device=lab.at)
    pool = HostPool(lab.device, layout, layout.num_pages)
    try:
        pairs = torch.arange(layout.num_pages, dtype=torch.int32, device=lab.at).repeat_interleave(2).view(-1, 2)
        copy = _copier(lab, layout)
        for name, source, destination in (("save", cache, pool.pages), ("restore", pool.pages, cache)):
            us = lab.clock.work_us([partial(copy, source, destination, pairs)])
            results.fact(f"link.pages.{name}", layout.num_bytes / us / 1e3, "GB/s", "by a kernel, page by page")
    finally:
        lab.device.synchronize()
        pool.close()


def tell_choice(results: Results, name: str, forward_pass: CudaDecoderPass) -> None:
    """What `create_cache` measured, and what followed."""
    costs = forward_pass.token_costs
    results.fact(f"{name}.host_pages.copy", costs.copy_s * 1e6, "us", "a token's KV there and back, by the link")
    results.fact(f"{name}.host_pages.compute", costs.compute_s * 1e6, "us", "a token of the largest prefill step")
    choice = "kept on the host" if forward_pass.num_host_pages else "computed again"
    results.fact(f"{name}.host_pages", choice, "", f"{forward_pass.num_host_pages} places")


def _shape(layout: CacheLayout) -> tuple[int, int, int]:
    return layout.num_layers, layout.num_pages, layout.page_bytes


def _copier(lab: Lab, layout: CacheLayout) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Of source, destination and pairs, see `page_copies.copy_pages`."""
    launcher = lab.device.launcher
    launcher.prepare(page_copies.kernels())
    return partial(page_copies.copy_pages, launcher, layout=layout)
