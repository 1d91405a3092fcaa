"""A page of all layers as bytes, for memory that outlives the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.backend.passes.ops.interface import PageParts


def save_page(cache: list[Tensor] | PageParts, page: int, content: NDArray[np.uint8]) -> None:
    """Copy a page to content, [bytes of a page]."""
    end = 0
    for part in _parts(cache, page):
        found = part.contiguous().view(torch.uint8).flatten().numpy()
        start, end = end, end + len(found)
        content[start:end] = found


def restore_page(cache: list[Tensor] | PageParts, page: int, content: NDArray[np.uint8]) -> None:
    """Copy content, which `save_page` has written, to a page."""
    end = 0
    for part in _parts(cache, page):
        start, end = end, end + part.numel() * part.element_size()
        there = torch.from_numpy(content[start:end])
        if part.dtype is not torch.uint8:
            there = there.clone().view(part.dtype)  # aligned to its numbers
        part.copy_(there.view(part.shape))


def _parts(cache: list[Tensor] | PageParts, page: int) -> list[Tensor]:
    return [layer[page] for layer in cache] if isinstance(cache, list) else cache.parts(page)
