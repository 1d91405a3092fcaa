"""Copies pages of KV cache between the cache and host memory, or within the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from penstock.backend.passes.cuda.device.launcher import Kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from penstock.backend.passes.cuda.device.launcher import Launcher
    from penstock.backend.passes.cuda.kv_cache.cache_layout import CacheLayout

_UNIT_BYTES = 16
_PIECE_BYTES = 256 * 4 * _UNIT_BYTES
"""Bytes of a page that one block copies."""

_COPY_PAGES = Kernel("copies.cu", "copy_pages", (), num_threads=256)


def kernels() -> Iterator[Kernel]:
    """Yield all instantiations; see `kernel_manifest`."""
    yield _COPY_PAGES


def copy_pages(launcher: Launcher, source: Tensor, destination: Tensor, pairs: Tensor, layout: CacheLayout) -> None:
    """Copy pages of source to pages of destination, both uint8 [num_layers, any number of pages, page_bytes].

    pairs int32 [n, 2]: (source page, destination page); a negative page is padding. If source and destination are the
    same cache, no page may be both. A cache reshapes with `cache.view(num_layers, -1, page_bytes)`; host memory must be
    mapped for the device.
    """
    page_bytes = layout.page_bytes
    strides = (np.int64(tensor.stride(0) // _UNIT_BYTES) for tensor in (source, destination))
    grid = (len(pairs), layout.num_layers, -(-page_bytes // _PIECE_BYTES))
    launcher.launch(_COPY_PAGES, grid, source, destination, pairs, np.int32(page_bytes // _UNIT_BYTES), *strides)
