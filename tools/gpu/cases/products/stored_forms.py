"""Weights in the forms that checkpoints have, near given numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from penstock.backend.checkpoint.quantization.quantizer import quantize
from penstock.backend.checkpoint.weight_forms.float8_weight import FLOAT8_GROUP_SIZE, Float8Weight
from penstock.backend.checkpoint.weight_forms.quantized_forms import GroupedForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import (
    E2M1,
    INT4_GROUP_SIZES,
    MXFP4_GROUP_SIZE,
    GroupedWeight,
    Mxfp4Weight,
    QuantizedWeight,
)


def _integers(weight: Tensor, group_size: int | None) -> QuantizedWeight:
    numbers = weight.to(torch.float32, copy=True)  # which `quantize` changes
    return quantize([numbers], (len(weight), weight.shape[1]), group_size)


def _float8(weight: Tensor) -> QuantizedWeight:
    """Groups of 128 inputs, as DeepSeek's blocks have them; the last one may be smaller."""
    highest = float(torch.finfo(torch.float8_e4m3fn).max)
    numbers = weight.float()
    groups = [numbers[:, i : i + FLOAT8_GROUP_SIZE] for i in range(0, numbers.shape[1], FLOAT8_GROUP_SIZE)]
    scales = torch.stack([group.abs().amax(dim=1) / highest for group in groups], dim=1)
    values = [group / scale for group, scale in zip(groups, scales.unsqueeze(-1).unbind(1), strict=True)]
    bits = torch.cat(values, dim=1).to(torch.float8_e4m3fn).view(torch.uint8)
    return Float8Weight(bits, scales, FLOAT8_GROUP_SIZE)


def _mxfp4(weight: Tensor) -> QuantizedWeight:
    groups = weight.float().view(len(weight), -1, MXFP4_GROUP_SIZE)
    steps = torch.tensor(E2M1[:8])
    _, exponents = torch.frexp(groups.abs().amax(dim=-1) / steps[-1])
    scales = torch.ldexp(torch.ones(exponents.shape), exponents)
    magnitudes = torch.bucketize((groups / scales.unsqueeze(-1)).abs(), (steps[1:] + steps[:-1]) / 2)
    codes = (magnitudes + 8 * (groups < 0)).to(torch.uint8).view(len(weight), -1)
    return Mxfp4Weight(codes[:, ::2] | codes[:, 1::2] << 4, scales)


def _blocks(weight: Tensor) -> QuantizedWeight:
    """Groups of 32 integers with a scale and a minimum, as Q4_1 has them."""
    outputs = len(weight)
    groups = weight.float().view(outputs, -1, 32)
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    factors = torch.stack([(high - low) / 15, -low], dim=-1).half().float()
    values = ((groups + factors[..., 1:]) / factors[..., :1]).round().clamp(0, 15).to(torch.uint8).view(outputs, -1)
    no_multipliers = torch.empty(outputs, 0, 2, dtype=torch.int8)
    return GroupedWeight(
        GroupedForm(4, 32, 32, has_minima=True), values[:, ::2] | values[:, 1::2] << 4, factors, no_multipliers
    )


STORED_FORMS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "int8": partial(_integers, group_size=None),
    "int4": partial(_integers, group_size=INT4_GROUP_SIZES[0]),
    "fp8-128": _float8,
    "mxfp4": _mxfp4,
    "q4_1": _blocks,
}
