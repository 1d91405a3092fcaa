"""Linear layers with quantised weights in torch: the formula of the native kernels, slowly.

A row of activations becomes int8, its largest magnitude 127. Sums of integers are exact, so the results differ from the
kernels' only by the rounding of the scales' products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.backend.checkpoint.quantized_weights import GroupedWeight, Int8Weight, QuantizedWeight, take_rows
from penstock.backend.passes.decoder.cpu.torch_linear import PackedLinear

_MAX_INT8 = 127.0
_SMALLEST = 1e-30
"""A row whose largest magnitude is smaller becomes 0, so its factor is finite."""
_EXACT_INPUTS = 1024
"""127 × 127 × this is below 2^24, so a sum of this many products is exact in fp32."""
_BLOCK_VALUES = 1 << 22
"""Weights that are in memory in fp32 at a time."""


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """x [n, in] → (x @ weight.T + bias) × scale, fp32 [n, out]."""

    weight: QuantizedWeight
    bias: Tensor | None
    scale: float = 1.0
    is_gated: bool = False
    """Its outputs are [gate | up]."""

    def __call__(self, x: Tensor) -> Tensor:
        values, scales = _quantize_rows(x.float())
        outputs, inputs = self.weight.shape
        step = max(1, _BLOCK_VALUES // inputs)
        blocks = [
            _product(values, take_rows(self.weight, slice(first, first + step))) for first in range(0, outputs, step)
        ]
        product = torch.cat(blocks, dim=1)
        if isinstance(self.weight, Int8Weight):
            product.mul_(scales[:, None] * self.weight.scales)
        else:
            product.mul_(scales[:, None])
        if self.bias is not None:
            product.add_(self.bias)
        return product if self.scale == 1.0 else product.mul_(self.scale)


TorchLinear: TypeAlias = PackedLinear | QuantizedLinear


def _quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Integers in fp32, and the scale of each row: NaN if it has a number that is not finite."""
    top = x.abs().amax(dim=1)
    factors = torch.where(top < _SMALLEST, 0.0, _MAX_INT8 / top)
    scales = torch.where(top.isfinite(), top / _MAX_INT8, torch.nan)
    return (x * factors[:, None]).round_(), scales


def _product(values: Tensor, weight: QuantizedWeight) -> Tensor:
    """fp32 [n, out]: sums of integers for int8; in other forms each group's sum is multiplied by its scale."""
    if isinstance(weight, Int8Weight):
        sums = torch.zeros(len(values), weight.shape[0], dtype=torch.float64)
        plain = weight.values.float()
        for first in range(0, weight.shape[1], _EXACT_INPUTS):
            part = slice(first, first + _EXACT_INPUTS)
            sums += values[:, part] @ plain[:, part].T
        return sums.float()
    if isinstance(weight, GroupedWeight):
        factors = weight.group_factors()
        total = _sum_groups(values, weight.integers().float(), factors[:, :, 0])
        if weight.form.has_minima:
            total -= values.view(len(values), -1, weight.form.group_size).sum(dim=2) @ factors[:, :, 1].T
        return total
    values_only = weight.with_parts(weight.values, torch.ones_like(weight.scales), *weight.parts[2:])
    return _sum_groups(values, values_only.dequantize(), weight.scales)


def _sum_groups(values: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    """[n, out]: values [n, in] and weights [out, in] multiplied in groups, with scales [out, groups]."""
    groups = (-1, scales.shape[1], values.shape[1] // scales.shape[1])
    sums = values.view(groups).transpose(0, 1) @ weights.view(groups).permute(1, 2, 0)
    return (sums * scales.T[:, None, :]).sum(dim=0)
