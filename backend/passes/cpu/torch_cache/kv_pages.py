"""The paged keys, or values, of one layer in plain torch, in each KV dtype, and pages of all layers as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from penstock.backend.passes.ops.interface import KV_BLOCK_VALUES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from penstock.backend.passes.ops.interface import PageParts

_MAX = 127.0
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


class KvPages(Protocol):
    """The keys, or the values, of one layer: [num_kv_heads, num_pages, page_size, head_dim]."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All memory of this cache."""
        ...

    def write(self, pages: Tensor, offsets: Tensor, heads: Tensor) -> None:
        """Store heads [T, num_kv_heads, head_dim]; token t goes to offset offsets[t] of page pages[t]."""
        ...

    def clear(self, pages: Tensor) -> None:
        """Zero these pages."""
        ...

    def copy(self, source: int, destination: int, num_tokens: int) -> None:
        """Copy the first num_tokens of a page to another, and zero the rest of that page."""
        ...

    def read(self, pages: Tensor) -> Tensor:
        """[num_kv_heads, *pages.shape, page_size, head_dim] fp32."""
        ...


class _Pages:
    """The part that does not depend on the storage format."""

    tensors: tuple[Tensor, ...]

    def clear(self, pages: Tensor) -> None:
        for tensor in self.tensors:
            tensor[:, pages] = 0

    def copy(self, source: int, destination: int, num_tokens: int) -> None:
        for tensor in self.tensors:
            tensor[:, destination, num_tokens:] = 0
            tensor[:, destination, :num_tokens] = tensor[:, source, :num_tokens]


class FloatKvPages(_Pages):
    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.numbers = torch.zeros(shape, dtype=dtype, device=device)
        self.tensors = (self.numbers,)

    def write(self, pages: Tensor, offsets: Tensor, heads: Tensor) -> None:
        self.numbers[:, pages, offsets] = heads.transpose(0, 1).to(self.numbers.dtype)

    def read(self, pages: Tensor) -> Tensor:
        return self.numbers[:, pages].float()


class Q8KvPages(_Pages):
    """Blocks of 32 values of a head that share a scale."""

    def __init__(self, shape: tuple[int, int, int, int], device: torch.device) -> None:
        *outer, head_dim = shape
        blocks = (*outer, head_dim // KV_BLOCK_VALUES)
        self.numbers = torch.zeros(*blocks, KV_BLOCK_VALUES, dtype=torch.int8, device=device)
        self.scales = torch.zeros(*blocks, 1, dtype=torch.float16, device=device)
        self.tensors = (self.numbers, self.scales)

    def write(self, pages: Tensor, offsets: Tensor, heads: Tensor) -> None:
        numbers, scales = quantise_q8_0(heads.transpose(0, 1))
        self.numbers[:, pages, offsets] = numbers
        self.scales[:, pages, offsets] = scales

    def read(self, pages: Tensor) -> Tensor:
        return (self.numbers[:, pages] * self.scales[:, pages].float()).flatten(-2)


def make_kv_pages(shape: tuple[int, int, int, int], kv_dtype: str, device: torch.device) -> KvPages:
    """shape: [num_kv_heads, num_pages, page_size, head_dim]."""
    if kv_dtype == "q8_0":
        return Q8KvPages(shape, device)
    return FloatKvPages(shape, {"fp32": torch.float32, "bf16": torch.bfloat16}[kv_dtype], device)


def quantise_q8_0(x: Tensor) -> tuple[Tensor, Tensor]:
    """Convert x [..., head_dim] to int8 [..., head_dim / 32, 32] and binary16 scales [..., head_dim / 32, 1].

    As GGML's q8_0: the scale is d = largest |x| / 127; numbers are x / d rounded to the nearest integer, ties away from
    zero; only then is d rounded to binary16. A block with a value that is not finite gets the scale NaN.
    """
    blocks = x.float().reshape(*x.shape[:-1], -1, KV_BLOCK_VALUES)
    scales = blocks.abs().amax(dim=-1, keepdim=True) / _MAX
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    scaled = blocks * torch.where(scales >= _SMALLEST_NORMAL, 1 / scales, 0.0)
    whole = scaled.trunc()
    numbers = whole + ((scaled - whole) * 2).trunc()
    return numbers.nan_to_num(0.0).to(torch.int8), scales.half()


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
