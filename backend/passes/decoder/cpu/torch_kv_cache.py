"""The paged keys, or values, of one layer in plain torch, in each KV dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from penstock.backend.passes.decoder.ops import KV_BLOCK_VALUES

if TYPE_CHECKING:
    from torch import Tensor

_MAX = 127.0
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


class KvPages(Protocol):
    """Places of [num_kv_heads, num_pages, page_size, head_dim]."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All the memory there is."""
        ...

    def write(self, pages: Tensor, places: Tensor, heads: Tensor) -> None:
        """heads [T, num_kv_heads, head_dim] go to (pages[t], places[t])."""
        ...

    def clear(self, pages: Tensor) -> None:
        """What is read of these pages is 0 until it is written."""
        ...

    def copy(self, source: int, destination: int, num_places: int) -> None:
        """The first num_places of a page to another; what is read of its other places is 0 until it is written."""
        ...

    def read(self, pages: Tensor) -> Tensor:
        """[num_kv_heads, *pages.shape, page_size, head_dim] fp32."""
        ...


class _Pages:
    """What does not depend on how a number is stored."""

    tensors: tuple[Tensor, ...]

    def clear(self, pages: Tensor) -> None:
        for tensor in self.tensors:
            tensor[:, pages] = 0

    def copy(self, source: int, destination: int, num_places: int) -> None:
        for tensor in self.tensors:
            tensor[:, destination, num_places:] = 0
            tensor[:, destination, :num_places] = tensor[:, source, :num_places]


class FloatKvPages(_Pages):
    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
        self.numbers = torch.zeros(shape, dtype=dtype)
        self.tensors = (self.numbers,)

    def write(self, pages: Tensor, places: Tensor, heads: Tensor) -> None:
        self.numbers[:, pages, places] = heads.transpose(0, 1).to(self.numbers.dtype)

    def read(self, pages: Tensor) -> Tensor:
        return self.numbers[:, pages].float()


class Q8KvPages(_Pages):
    """head_dim in blocks of 32 that share a scale."""

    def __init__(self, shape: tuple[int, int, int, int]) -> None:
        *places, head_dim = shape
        self.numbers = torch.zeros(*places, head_dim // KV_BLOCK_VALUES, KV_BLOCK_VALUES, dtype=torch.int8)
        self.scales = torch.zeros(*places, head_dim // KV_BLOCK_VALUES, 1, dtype=torch.float16)
        self.tensors = (self.numbers, self.scales)

    def write(self, pages: Tensor, places: Tensor, heads: Tensor) -> None:
        numbers, scales = quantise_q8_0(heads.transpose(0, 1))
        self.numbers[:, pages, places] = numbers
        self.scales[:, pages, places] = scales

    def read(self, pages: Tensor) -> Tensor:
        return (self.numbers[:, pages] * self.scales[:, pages].float()).flatten(-2)


def make_kv_pages(shape: tuple[int, int, int, int], kv_dtype: str) -> KvPages:
    """shape: [num_kv_heads, num_pages, page_size, head_dim]."""
    if kv_dtype == "q8_0":
        return Q8KvPages(shape)
    return FloatKvPages(shape, {"fp32": torch.float32, "bf16": torch.bfloat16}[kv_dtype])


def quantise_q8_0(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., head_dim] as int8 [..., head_dim / 32, 32] and binary16 scales [..., head_dim / 32, 1].

    GGML's q8_0: d = largest |x| / 127 and x / d to the nearest integer, ties away from zero, before d is rounded to
    binary16. A block with a number that is not finite gets the scale NaN.
    """
    blocks = x.float().reshape(*x.shape[:-1], -1, KV_BLOCK_VALUES)
    scales = blocks.abs().amax(dim=-1, keepdim=True) / _MAX
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    scaled = blocks * torch.where(scales >= _SMALLEST_NORMAL, 1 / scales, 0.0)
    whole = scaled.trunc()
    numbers = whole + ((scaled - whole) * 2).trunc()
    return numbers.nan_to_num(0.0).to(torch.int8), scales.half()
