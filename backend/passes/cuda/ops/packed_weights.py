"""Quantised weights on the device: the forms that have kernels, their memory, and their layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from penstock.backend.checkpoint.weight_forms.float8_weight import FLOAT8_GROUP_SIZE, Float8Form
from penstock.backend.checkpoint.weight_forms.quantized_forms import GroupedForm, PackedForm, WeightForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import (
    INT4_GROUP_SIZES,
    MXFP4_GROUP_SIZE,
    BlockWeight,
    GroupedWeight,
    QuantizedWeight,
    StackedWeight,
)
from penstock.backend.passes.shared_weights.blocks import SharedWeightsError

KernelForm: TypeAlias = WeightForm
MXFP4_FORM = PackedForm(MXFP4_GROUP_SIZE, has_zeros=False)
_FORMS = frozenset(
    {PackedForm(None), *map(PackedForm, INT4_GROUP_SIZES), MXFP4_FORM, Float8Form(None), Float8Form(FLOAT8_GROUP_SIZE)}
)
_CHUNK_BYTES = 64
"""Contiguous bytes of one output's values; see kernels/products/quantised_weights.cuh."""
_E8M0_BIAS = 127


def has_kernels(form: WeightForm) -> bool:
    """Whether linears stored in the form stay in it. Others are dequantised when they are read."""
    return isinstance(form, GroupedForm) or form in _FORMS


def takes_packed(dtype: torch.dtype) -> bool:
    """Whether weights stay packed with activations of dtype. With fp32 they are dequantised."""
    return dtype is not torch.float32


def kernel_form(form: WeightForm) -> KernelForm:
    """The form on the device: groups have integers of 4 bits if there are minima, else of 8."""
    if isinstance(form, GroupedForm) and (form.bits != 4 or not form.has_minima):
        return replace(form, bits=8, codebook="")
    return form


def value_bits(form: KernelForm) -> int:
    if isinstance(form, GroupedForm):
        return form.bits
    return 4 if isinstance(form, PackedForm) and form.group_size is not None else 8


def chunk_inputs(form: KernelForm) -> int:
    """Inputs of an output whose values are contiguous; the last ones are filled up."""
    return _CHUNK_BYTES * 8 // value_bits(form)


def packed_bytes(form: WeightForm, shape: tuple[int, int], dtype: torch.dtype) -> int:
    """Memory of a linear [outputs, inputs] on the device, as `PackedForm.num_bytes`, with the last chunks filled up."""
    outputs, inputs = shape
    if not has_kernels(form) or not takes_packed(dtype):
        return outputs * inputs * dtype.itemsize
    form = kernel_form(form)
    filled = outputs, -(-inputs // chunk_inputs(form)) * chunk_inputs(form)
    if form == MXFP4_FORM:
        return filled[0] * (filled[1] // 2 + filled[1] // MXFP4_GROUP_SIZE)
    return form.num_bytes(filled)


@dataclass(frozen=True, slots=True)
class CudaQuantizedLinear:
    """The layout is that of kernels/products/quantised_weights.cuh. Its fields after zeros are as in `CudaLinear`."""

    form: KernelForm
    shape: tuple[int, int]
    """(outputs, inputs)"""
    values: Tensor
    """uint8 [outputs, bytes]"""
    scales: Tensor
    """GGML's blocks: factors, fp16 [outputs, blocks, kinds]. Integers of 4 bits: fp16 [outputs, groups]. MXFP4: uint8
    [outputs, groups], exponents + 127. Others: fp32, one per output or [outputs, groups]."""
    zeros: Tensor
    """GGML's blocks: multipliers, uint8 [outputs, groups, kinds]. Integers of 4 bits: uint8 [outputs, groups]. Others:
    any tensor, which is not read."""
    bias: Tensor | None
    scale: float = 1.0
    is_gated: bool = False

    @property
    def num_outputs(self) -> int:
        return self.shape[0]

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.values, self.scales, self.zeros

    @property
    def blocks(self) -> int:
        """As `PackedWeights::blocks` in kernels/products/quantised_weights.cuh."""
        form = self.form
        if not isinstance(form, GroupedForm):
            return 0
        return (form.group_size.bit_length() - 1) | (form.block_size.bit_length() - 1) << 8 | form.has_minima << 16


def distinct_parts(packed: CudaQuantizedLinear) -> tuple[Tensor, ...]:
    """Return `parts` without unused zeros: then scales are the last part."""
    return packed.parts[:2] if packed.zeros is packed.scales else packed.parts


def as_linear(
    form: KernelForm, parts: tuple[Tensor, ...], shape: tuple[int, int], dtype: torch.dtype
) -> CudaQuantizedLinear:
    """Return the linear of these `distinct_parts`. Raises SharedWeightsError if they do not fit such a linear."""
    num_bytes = sum(part.numel() * part.itemsize for part in parts)
    if not has_kernels(form) or not 2 <= len(parts) <= 3 or num_bytes != packed_bytes(form, shape, dtype):
        raise SharedWeightsError(f"{len(parts)} parts of {num_bytes} bytes are no linear {shape} in {form}")
    return CudaQuantizedLinear(form, shape, parts[0], parts[1], parts[-1], None)


def pack_weight(
    weight: QuantizedWeight, device: torch.device, bias: Tensor | None, scale: float, *, is_gated: bool
) -> CudaQuantizedLinear:
    """bias is on the device already. Raises TypeError for a form without kernels."""
    form = kernel_form(weight.form)
    if not has_kernels(form) or isinstance(weight, StackedWeight):
        raise TypeError(f"no kernels for {form}")
    weight = weight.decode() if isinstance(weight, BlockWeight) else weight
    if isinstance(weight, GroupedWeight) and isinstance(form, GroupedForm):
        weight = weight.widen(form)
    values, scales, zeros = _pack_parts(form, *(part.to(device) for part in weight.parts))
    return CudaQuantizedLinear(form, weight.shape, values, scales, zeros, bias, scale, is_gated)


def _pack_parts(form: KernelForm, values: Tensor, scales: Tensor, *zeros: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Parts of a QuantizedWeight on the device → those of a CudaQuantizedLinear."""
    filled = functional.pad(values.view(torch.uint8), (0, -values.shape[1] % _CHUNK_BYTES))
    num_inputs = filled.shape[1] * 8 // value_bits(form)
    packed = _order_bytes(filled) if value_bits(form) == 8 else _order_pairs(filled)
    if isinstance(form, GroupedForm):
        factors = _fill(scales.half(), num_inputs // form.block_size)
        multipliers = zeros[0].view(torch.uint8)
        return packed, factors, _fill(multipliers, num_inputs // form.group_size) if form.has_multipliers else factors
    if value_bits(form) == 8:
        scales = scales.contiguous()
        return packed, scales, scales
    groups = num_inputs // (form.group_size or num_inputs)
    if not zeros:
        exponents = (torch.frexp(scales).exponent - 1 + _E8M0_BIAS).to(torch.uint8)  # frexp has numbers from 0.5 to 1
        filled_exponents = _fill(exponents, groups)
        return packed, filled_exponents, filled_exponents
    return packed, _fill(scales.half(), groups), _fill(zeros[0], groups)


def _order_bytes(filled: Tensor) -> Tensor:
    """Order 8-bit values for the kernels."""
    return filled.view(len(filled), -1, 2, 4, 8).transpose(2, 3).reshape(len(filled), -1)


def _order_pairs(filled: Tensor) -> Tensor:
    """Order 4-bit values for the kernels."""
    outputs = len(filled)
    pairs = filled.view(outputs, -1, 4, 4, 4)  # chunk, step, lane, two inputs in each of four bytes
    low, high = pairs & 15, pairs >> 4
    words = torch.stack([part[..., i] | part[..., i + 1] << 4 for part in (low, high) for i in (0, 2)], dim=-1)
    return words.transpose(2, 3).reshape(outputs, -1)


def _fill(part: Tensor, count: int) -> Tensor:
    """Fill up [outputs, fewer, …] to [outputs, count, …]."""
    missing = (0, count - part.shape[1])
    return functional.pad(part, (0, 0, *missing) if part.dim() == 3 else missing)
