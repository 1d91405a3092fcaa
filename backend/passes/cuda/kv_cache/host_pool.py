"""KV pages in host memory: decides whether copying is faster than recomputing, and allocates the memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from penstock.shm.buffers.device_api import DeviceError

if TYPE_CHECKING:
    from penstock.backend.passes.cuda.device.device import Device
    from penstock.backend.passes.cuda.device.link_probe import LinkSpeed
    from penstock.backend.passes.cuda.kv_cache.cache_layout import CacheLayout

logger = logging.getLogger("penstock.backend")


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Seconds to get back the keys and values of one token, in all layers."""

    copy_s: float
    """Copy them to the host and back."""
    compute_s: float
    """Recompute them in a prefill step of the largest size."""

    def __str__(self) -> str:
        return (
            f"a token's KV takes {self.copy_s * 1e6:.2f} µs to copy to the host and back, "
            f"{self.compute_s * 1e6:.2f} µs to recompute"
        )


def count_host_pages(costs: TokenCosts, page_bytes: int, budget_bytes: int) -> int:
    """Return the number of pages that fit the budget; 0 if recomputing is at least as fast as copying."""
    return budget_bytes // page_bytes if costs.copy_s < costs.compute_s else 0


class HostPool:
    """Host pages, possibly none, in page-locked memory that kernels read and write."""

    def __init__(self, device: Device, layout: CacheLayout, num_pages: int) -> None:
        """layout is the cache's. Raises DeviceError if the driver cannot lock the memory."""
        self._memory = device.host_memory(replace(layout, num_pages=num_pages).num_bytes) if num_pages else None
        held = torch.empty(0, dtype=torch.uint8) if self._memory is None else self._memory.bytes
        self.pages = held.view(layout.num_layers, num_pages, layout.page_bytes)
        """uint8 [layers, num_pages, page bytes], like the cache."""

    @property
    def num_pages(self) -> int:
        return self.pages.shape[1]

    def close(self) -> None:
        """Free the memory. Call once, after the device's last use of it."""
        del self.pages
        if self._memory is not None:
            self._memory.free()


def open_pool(device: Device, layout: CacheLayout, link: LinkSpeed, costs: TokenCosts, budget_bytes: int) -> HostPool:
    """Open a pool of `count_host_pages` pages, or of none if the memory cannot be locked; log which, and why."""
    page_bytes = layout.num_layers * layout.page_bytes
    num_pages = count_host_pages(costs, page_bytes, budget_bytes)
    gigabytes = num_pages * page_bytes / 1e9
    try:
        pool = HostPool(device, layout, num_pages)
    except DeviceError as error:
        message = "%.2f GB of host memory cannot be page-locked (%s); pages of preempted sequences are recomputed"
        logger.warning(message, gigabytes, error)
        return HostPool(device, layout, 0)
    if num_pages:
        follows = f"are kept in {gigabytes:.2f} GB of host memory"
    else:
        too_small = f": {budget_bytes / 1e9:.2f} GB of host memory do not hold one page"
        follows = f"are recomputed{too_small if costs.copy_s < costs.compute_s else ''}"
    logger.info("host link: %s; %s; pages of preempted sequences %s", link, costs, follows)
    return pool
