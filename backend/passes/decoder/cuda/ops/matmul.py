"""The products of a step's rows and weights, by torch, from buffers into buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_ROWS = 128
"""Few enough that reading the weights takes longer than the arithmetic: of 16-bit weights a product of M rows does M
operations for each byte, and an H200 some 180 (computed, not measured). Enough that each block begins at a multiple of
256 bytes, whatever the width: libraries choose by alignment too."""


@dataclass(frozen=True, slots=True)
class CudaLinear:
    weight: Tensor
    """[out, in]"""
    transposed: Tensor
    bias: Tensor | None


class Matmul(Protocol):
    """How many rows of a step a product takes at a time."""

    def padded_rows(self, num_rows: int) -> int:
        """The rows that a buffer needs for `multiply` to read or write the first num_rows of it."""
        ...

    def num_launches(self, num_rows: int) -> int:
        """The kernels that `multiply` launches, at least."""
        ...

    def multiply(self, x: Tensor, weights: CudaLinear, out: Tensor) -> Tensor:
        """Write x [T, in] · weights to out [T, out]; return out. Both must begin buffers of `padded_rows(T)` rows."""
        ...


class WholeMatmul:
    """See `Matmul`. The library may choose another kernel, and another order of its sums, for another number of
    rows."""

    def padded_rows(self, num_rows: int) -> int:
        return num_rows

    def num_launches(self, num_rows: int) -> int:  # noqa: ARG002 - it is the same for all
        return 1

    def multiply(self, x: Tensor, weights: CudaLinear, out: Tensor) -> Tensor:
        return _multiply(x, weights, out)


class BlockedMatmul:
    """See `Matmul`. Each product has BLOCK_ROWS rows, so that a weight's kernel is always the same one.

    What the rows hold that fill up the last block does not matter: no row of a product has part in another one.
    """

    def padded_rows(self, num_rows: int) -> int:
        return self.num_launches(num_rows) * BLOCK_ROWS

    def num_launches(self, num_rows: int) -> int:
        return -(-num_rows // BLOCK_ROWS)

    def multiply(self, x: Tensor, weights: CudaLinear, out: Tensor) -> Tensor:
        for first in range(0, len(x), BLOCK_ROWS):
            _multiply(_block(x, first), weights, _block(out, first))
        return out


def _block(rows: Tensor, first: int) -> Tensor:
    """Also of rows of the buffer that lie behind those in use."""
    size, stride = rows.shape[1], rows.stride(0)
    return rows.as_strided((BLOCK_ROWS, size), (stride, 1), rows.storage_offset() + first * stride)


def _multiply(x: Tensor, weights: CudaLinear, out: Tensor) -> Tensor:
    if weights.bias is None:
        return torch.mm(x, weights.transposed, out=out)
    return torch.addmm(weights.bias, x, weights.transposed, out=out)
