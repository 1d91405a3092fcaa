"""Torch operations that give a row the same bits alone and in any batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from penstock.backend.passes.cpu.in_torch.query_tiles import ONE_BY_ONE
from penstock.backend.passes.cpu.in_torch.torch_experts import GroupedWeights, product_by_product
from penstock.backend.passes.cpu.in_torch.torch_linear import PackedLinear
from penstock.backend.passes.cpu.in_torch.torch_ops import TorchOps
from penstock.backend.passes.cpu.in_torch.torch_quantized_linear import TorchLinear

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

    def _grouped_product(self, x: Tensor, weights: GroupedWeights, ends: Tensor) -> Tensor:
        inputs = x.shape[1]
        linears = (
            (PackedLinear(weight[:, :inputs], None, packed=False) for weight in weights)
            if isinstance(weights, torch.Tensor)
            else weights
        )
        return product_by_product(x, linears, ends, self._product)

    def _sigmoid(self, x: Tensor) -> Tensor:
        return torch.stack([super(DeterministicTorchOps, self)._sigmoid(row) for row in x])

    def _activate(self, x: Tensor) -> Tensor:
        return torch.stack([super(DeterministicTorchOps, self)._activate(row) for row in x])

    def _cap_rows(self, x: Tensor, cap: float) -> Tensor:
        return torch.stack([super(DeterministicTorchOps, self)._cap_rows(row, cap) for row in x])
