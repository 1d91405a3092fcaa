"""The torch operations with every row by itself: a row's result is the same bits alone and in any batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from penstock.backend.passes.decoder.cpu.torch_ops import TorchOps
from penstock.backend.passes.decoder.cpu.torch_query_tiles import ONE_BY_ONE

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.backend.passes.decoder.cpu.torch_linear import PackedLinear

_TILE_ROWS = 16


class DeterministicTorchOps(TorchOps):
    """Products always have the same shape, so that the number of rows never chooses their kernel; tokens attend one by
    one, in a shape that their position gives. silu goes row by row: torch's vectorised loop and the one for what is
    left over give different bits, and where one ends depends on the array's size. All else torch computes for each
    number or each row by one formula.
    """

    tile_limits = ONE_BY_ONE

    def product(self, x: Tensor, weights: PackedLinear) -> Tensor:
        padded = functional.pad(x, (0, 0, 0, -len(x) % _TILE_ROWS))
        tiles = padded.view(-1, _TILE_ROWS, x.shape[1])
        return torch.cat([weights(tile) for tile in tiles])[: len(x)]

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.stack([functional.silu(row) for row in gate]).mul_(up)
