"""Torch operations that give a row the same bits alone and in any batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from penstock.backend.passes.decoder.cpu.torch_cache.query_tiles import ONE_BY_ONE
from penstock.backend.passes.decoder.cpu.torch_linear import PackedLinear
from penstock.backend.passes.decoder.cpu.torch_ops import TorchLinear, TorchOps

if TYPE_CHECKING:
    from torch import Tensor


_TILE_ROWS = 16


class DeterministicTorchOps(TorchOps):
    """Removes every influence of the batch's size on a row.

    Products always have the same shape, because torch chooses their kernel by the number of rows; those of experts run
    one after the other, because torch's grouped product computes each with its own number of rows. Tokens attend one by
    one, in a shape that depends on their position alone. Activations, sigmoids and the soft cap of logits run row by
    row: torch's vectorised loop and its loop for the remainder give different bits, and the array's size decides where
    one ends. Torch computes everything else per number or per row, by one formula.
    """

    tile_limits = ONE_BY_ONE

    def _product(self, x: Tensor, weights: TorchLinear) -> Tensor:
        if not len(x):
            return weights(x)
        padded = functional.pad(x, (0, 0, 0, -len(x) % _TILE_ROWS))
        tiles = padded.view(-1, _TILE_ROWS, x.shape[1])
        return torch.cat([weights(tile) for tile in tiles])[: len(x)]

    def _grouped_product(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        products, begin = [], 0
        for weight, end in zip(weights, ends.tolist(), strict=True):
            if end > begin:
                linear = PackedLinear(weight[:, : x.shape[1]], None, packed=False)
                products.append(self._product(x[begin:end], linear))
            begin = end
        return torch.cat(products)

    def _sigmoid(self, x: Tensor) -> Tensor:
        return torch.stack([super(DeterministicTorchOps, self)._sigmoid(row) for row in x])

    def _activate(self, x: Tensor) -> Tensor:
        return torch.stack([super(DeterministicTorchOps, self)._activate(row) for row in x])

    def _cap_rows(self, x: Tensor, cap: float) -> Tensor:
        return torch.stack([super(DeterministicTorchOps, self)._cap_rows(row, cap) for row in x])
