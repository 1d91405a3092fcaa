"""Pages in the host's memory: whether they are quicker than computing them again, and the memory itself."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from penstock.shm.buffers.device_api import DeviceError

if TYPE_CHECKING:
    from penstock.backend.passes.decoder.cuda.device.device import Device
    from penstock.backend.passes.decoder.cuda.device.link_probe import LinkSpeed
    from penstock.backend.passes.decoder.cuda.kv_cache.cache_layout import CacheLayout

logger = logging.getLogger("penstock.backend")


@dataclass(frozen=True, slots=True)
class TokenCosts:
    """Of a token's keys and values in all layers: what having them back takes."""

    copy_s: float
    """To the host and back."""
    compute_s: float
    """In a prefill step as large as steps get."""

    def __str__(self) -> str:
        return (
            f"a token's KV takes {self.copy_s * 1e6:.2f} µs to copy there and back, "
            f"{self.compute_s * 1e6:.2f} µs to compute again"
        )


def count_host_pages(costs: TokenCosts, page_bytes: int, budget_bytes: int) -> int:
    """As many pages as the budget holds; 0 where they are computed as quickly as they are copied there and back."""
    return budget_bytes // page_bytes if costs.copy_s < costs.compute_s else 0


class HostPool:
    """Places of a page each, in page-locked memory that kernels read and write. There may be none."""

    def __init__(self, device: Device, layout: CacheLayout, num_pages: int) -> None:
        """layout is the cache's. Raises DeviceError where the driver locks no such memory."""
        self._memory = device.host_memory(replace(layout, num_pages=num_pages).num_bytes) if num_pages else None
        held = torch.empty(0, dtype=torch.uint8) if self._memory is None else self._memory.bytes
        self.pages = held.view(layout.num_layers, num_pages, layout.page_bytes)
        """uint8: the cache's layout, with another number of pages."""

    @property
    def num_pages(self) -> int:
        return self.pages.shape[1]

    def close(self) -> None:
        """Once, and after the device's last use of it."""
        del self.pages
        if self._memory is not None:
            self._memory.free()


def open_pool(device: Device, layout: CacheLayout, link: LinkSpeed, costs: TokenCosts, budget_bytes: int) -> HostPool:
    """Open a pool of `count_host_pages` pages, or of none if that memory is refused; log which, and why."""
    page_bytes = layout.num_layers * layout.page_bytes
    num_pages = count_host_pages(costs, page_bytes, budget_bytes)
    gigabytes = num_pages * page_bytes / 1e9
    try:
        pool = HostPool(device, layout, num_pages)
    except DeviceError as error:
        again = f"pages of preempted sequences are computed again: {gigabytes:.2f} GB of host memory"
        logger.warning("%s cannot be page-locked (%s)", again, error)
        return HostPool(device, layout, 0)
    if num_pages:
        follows = f"are kept in {gigabytes:.2f} GB of host memory"
    else:
        holds_none = f", for {budget_bytes / 1e9:.2f} GB of host memory hold none"
        follows = f"are computed again{holds_none if costs.copy_s < costs.compute_s else ''}"
    logger.info("host link: %s; %s: pages of preempted sequences %s", link, costs, follows)
    return pool
