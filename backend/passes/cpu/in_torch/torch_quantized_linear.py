"""Linear layers with quantised weights in torch: the formula of the native kernels, slowly.

Activations become int8, with one scale for each 32 inputs or for each row, as in kernels/linears/quantized_rows.h. The
results differ from the kernels' only by the rounding of fp32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight, SimpleWeight, StackedWeight
from penstock.backend.checkpoint.weight_forms.stacked_weights import take_rows
from penstock.backend.passes.cpu.in_torch.torch_linear import PackedLinear

UNIT = 32
"""Inputs of a row that share a scale."""
_MAX_INT8 = 127.0
_WIDE = 1.5
"""A unit is wide from this multiple of the root mean square of the units' largest magnitudes on."""
_REMAINDER = 254.0
"""A scale / this is that of the remainders, which are up to half a step."""
_SMALLEST = 1e-30
"""Inputs whose largest magnitude is smaller become 0, so their factor is finite."""
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
    rounds_rows: bool = False
    """A row has one scale."""

    def __call__(self, x: Tensor) -> Tensor:
        inputs = self.weight.shape[1]
        rounded = round_rows(x.float(), inputs if self.rounds_rows else UNIT)
        weights = self.weight.weights if isinstance(self.weight, StackedWeight) else (self.weight,)
        step = max(1, _BLOCK_VALUES // inputs)
        blocks = [rounded @ block.T for weight in weights for block in _dequantized_blocks(weight, step)]
        product = torch.cat(blocks, dim=1)
        if self.bias is not None:
            product.add_(self.bias)
        return product if self.scale == 1.0 else product.mul_(self.scale)


TorchLinear: TypeAlias = PackedLinear | QuantizedLinear


def _dequantized_blocks(weight: SimpleWeight, step: int) -> list[Tensor]:
    return [take_rows(weight, slice(first, first + step)).dequantize() for first in range(0, weight.shape[0], step)]


def round_rows(x: Tensor, group_size: int) -> Tensor:
    """Round x [n, in] to multiples of a scale for each group: NaN if the group has a number that is not finite.

    What rounding leaves in groups of UNIT that are wide is rounded again.
    """
    groups = functional.pad(x, (0, -x.shape[1] % group_size)).view(len(x), -1, group_size)
    top = groups.abs().amax(dim=2, keepdim=True)
    # Not 127 / top, which torch computes as 127 times a rounded 1 / top.
    factors = torch.where(top < _SMALLEST, 0.0, torch.full_like(top, _MAX_INT8).div_(top))
    scales = torch.where(top.isfinite(), top / _MAX_INT8, torch.nan)
    steps = groups * factors
    rounded = steps.round() * scales
    if group_size == UNIT:
        is_wide = top > _WIDE * top.square().mean(dim=1, keepdim=True).sqrt()
        rests = (steps - steps.round()).mul_(_REMAINDER).round_() * (scales / _REMAINDER)
        rounded += torch.where(is_wide, rests, 0.0)
    return rounded.view(len(x), -1)[:, : x.shape[1]]
