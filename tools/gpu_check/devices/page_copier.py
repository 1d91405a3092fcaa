"""Copies KV cache pages between the device and the host with the copy kernel."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from penstock.backend.passes.decoder.cuda.kv_cache import page_copies
from penstock.backend.passes.decoder.cuda.kv_cache.cache_layout import CacheLayout

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from penstock.tools.gpu_check.devices.device_context import DeviceContext


def cache_shape(layout: CacheLayout) -> tuple[int, int, int]:
    return layout.num_layers, layout.num_pages, layout.page_bytes


def make_page_copier(context: DeviceContext, layout: CacheLayout) -> Callable[[Tensor, Tensor, Tensor], None]:
    """A function of source, destination and pairs: see `page_copies.copy_pages`."""
    launcher = context.device.launcher
    launcher.prepare(page_copies.kernels())
    return partial(page_copies.copy_pages, launcher, layout=layout)
