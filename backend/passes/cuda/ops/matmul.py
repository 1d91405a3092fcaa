"""Matrix products of a step's rows and weights, by torch, between preallocated buffers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from penstock.backend.passes.cuda.device.kernel_choices import CONSTANTS

BLOCK_ROWS = 128
"""Small enough that reading the weights takes longer than the arithmetic: with 16-bit weights a product of M rows does
M operations per byte, and an H200 can do about 180 (computed, not measured). Large enough that each block begins at a
multiple of 256 bytes for any width: libraries choose kernels by alignment too."""


@dataclass(frozen=True, slots=True)
class CudaLinear:
    weight: Tensor
    """[out, in]"""
    transposed: Tensor
    bias: Tensor | None
    scale: float = 1.0
    """The results are multiplied by it, bias included."""
    is_gated: bool = False
    """Its outputs are [gate | up]."""

    @property
    def num_outputs(self) -> int:
        return self.weight.shape[0]


class Matmul(Protocol):
    """A way to divide a step's rows into products."""

    @property
    def kernel_rows(self) -> int:
        """The most rows for which a kernel of ours multiplies with quantised weights, which it reads once per 64 rows.

        A row of its results never depends on the other rows.
        """

    @property
    def grouped_rows(self) -> int:
        """The fewest rows whose experts are grouped products of torch; 0: none."""

    @property
    def is_invariant(self) -> bool:
        """Whether all products of a weight use one kernel, so that a row has the same bits in any batch."""

    def padded_rows(self, num_rows: int) -> int:
        """Return the rows that a buffer must have so that `multiply` can use its first num_rows."""

    def num_launches(self, num_rows: int) -> int:
        """Return the minimum number of kernels that `multiply` launches."""

    def multiply(self, x: Tensor, weights: CudaLinear, out: Tensor) -> Tensor:
        """Write x [T, in] · weights to out [T, out]; return out. Both must begin buffers of `padded_rows(T)` rows."""


@dataclass(frozen=True, slots=True)
class WholeMatmul:
    """One product for all rows. The library may choose a kernel with another summation order for another number of
    rows, unless the GPU was found to be invariant."""

    kernel_rows: int = CONSTANTS.quantised_rows
    is_invariant: bool = False
    grouped_rows: int = CONSTANTS.grouped_rows

    def padded_rows(self, num_rows: int) -> int:
        return num_rows

    def num_launches(self, num_rows: int) -> int:  # noqa: ARG002 - the protocol has the parameter
        return 1

    def multiply(self, x: Tensor, weights: CudaLinear, out: Tensor) -> Tensor:
        return multiply(x, weights, out)


def forbid_split_sums() -> None:
    """Forbid the library, in this process, to split a product's sums among blocks (torch >= 2.10): an H100 then gave a
    row the same bits in products of 1 to 2,048 rows."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


INVARIANT_MATMUL = WholeMatmul(sys.maxsize, is_invariant=True)
"""For a GPU whose library gives a row the same bits in a product of any number of rows."""


class BlockedMatmul:
    """Products of exactly block_rows rows, so that the library always chooses the same kernel for a weight.

    The rows that fill up the last block may hold anything: a row of a product does not depend on the other rows.
    """

    kernel_rows = sys.maxsize
    grouped_rows = 0
    is_invariant = True

    def __init__(self, block_rows: int = BLOCK_ROWS) -> None:
        self._block_rows = block_rows

    def padded_rows(self, num_rows: int) -> int:
        return self.num_launches(num_rows) * self._block_rows

    def num_launches(self, num_rows: int) -> int:
        return -(-num_rows // self._block_rows)

    def multiply(self, x: Tensor, weights: CudaLinear, out: Tensor) -> Tensor:
        for first in range(0, len(x), self._block_rows):
            multiply(self._block(x, first), weights, self._block(out, first))
        return out

    def _block(self, rows: Tensor, first: int) -> Tensor:
        """Return block_rows rows of the buffer, which may extend beyond the end of `rows`."""
        size, stride = rows.shape[1], rows.stride(0)
        return rows.as_strided((self._block_rows, size), (stride, 1), rows.storage_offset() + first * stride)


def multiply(x: Tensor, weights: CudaLinear, out: Tensor) -> Tensor:
    """out [T, outputs] = x [T, in] · weights, in one product; return out."""
    if weights.bias is not None:
        scale = weights.scale
        return torch.addmm(weights.bias, x, weights.transposed, beta=scale, alpha=scale, out=out)
    if weights.scale != 1.0:
        return out.addmm_(x, weights.transposed, beta=0, alpha=weights.scale)
    return torch.mm(x, weights.transposed, out=out)
