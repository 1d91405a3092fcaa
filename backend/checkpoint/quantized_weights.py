"""Weights of a linear layer in 8 or 4 bits: the form between a quantiser and the operations that pack them.

A weight is [outputs, inputs], row-major, as an unquantised one. A gated pair is one weight whose rows are [gate | up].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_QUANTIZED_INPUTS = 1 << 17
"""127 × 128 × this is below 2^31, so a sum of products of int8 is exact in int32: activations are from -127 to 127."""

INT4_GROUP_SIZES = (32, 128)


_SCALE_BYTES_INT8 = 4
_SCALE_BYTES_INT4 = 2
_ZERO_BYTES_INT4 = 1


@dataclass(frozen=True, slots=True)
class PackedForm:
    """The form of a quantised weight, without its numbers."""

    group_size: int | None
    """Inputs that share a scale and a zero point of 4-bit values; None for 8 bits and one scale per output."""

    def num_bytes(self, shape: tuple[int, int]) -> int:
        """Memory of a packed linear [outputs, inputs]: values, scales and zeros."""
        outputs, inputs = shape
        if self.group_size is None:
            return outputs * (inputs + _SCALE_BYTES_INT8)
        return outputs * (inputs // 2 + inputs // self.group_size * (_SCALE_BYTES_INT4 + _ZERO_BYTES_INT4))


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """w = scale × value, with one scale per output. Raises ValueError for other shapes, dtypes or values."""

    values: Tensor
    """int8 [outputs, inputs]"""
    scales: Tensor
    """float32 [outputs], finite."""

    def __post_init__(self) -> None:
        _check_tensor("values", self.values, torch.int8, 2)
        outputs, inputs = self.shape
        _check_inputs(inputs)
        _check_scales(self.scales, (outputs,))

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        outputs, inputs = self.values.shape
        return outputs, inputs

    def dequantize(self) -> Tensor:
        """Float32 [outputs, inputs]."""
        return self.values.float().mul_(self.scales[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """w = scale × (value - zero), with a scale and a zero point per output and group of consecutive inputs.

    A zero of 8 everywhere, the symmetric form, is the fastest. Raises ValueError for other shapes, dtypes or values.
    """

    values: Tensor
    """uint8 [outputs, inputs / 2], two inputs in a byte: the low 4 bits are the even input."""
    scales: Tensor
    """float32 [outputs, inputs / group_size], each a finite number of binary16, which is how they are packed."""
    zeros: Tensor
    """uint8 [outputs, inputs / group_size], from 0 to 15."""
    group_size: int
    """One of INT4_GROUP_SIZES; it divides the number of inputs."""

    def __post_init__(self) -> None:
        if self.group_size not in INT4_GROUP_SIZES:
            raise ValueError(f"the group size of an int4 weight is one of {INT4_GROUP_SIZES}, not {self.group_size}")
        _check_tensor("values", self.values, torch.uint8, 2)
        outputs, inputs = self.shape
        _check_inputs(inputs)
        if inputs % self.group_size:
            raise ValueError(f"{inputs} inputs cannot be divided into groups of {self.group_size}")
        groups = (outputs, inputs // self.group_size)
        _check_scales(self.scales, groups)
        if not torch.equal(self.scales.half().float(), self.scales):
            raise ValueError("scales of an int4 weight must be numbers of binary16: round them before the values")
        _check_tensor("zeros", self.zeros, torch.uint8, 2)
        if self.zeros.shape != groups:
            raise ValueError(f"zeros must be {list(groups)}, not {list(self.zeros.shape)}")
        if bool((self.zeros > 15).any()):
            raise ValueError("zeros of an int4 weight are from 0 to 15")

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        outputs, half = self.values.shape
        return outputs, 2 * half

    def dequantize(self) -> Tensor:
        """Float32 [outputs, inputs]."""
        outputs, inputs = self.shape
        values = torch.stack([self.values & 15, self.values >> 4], dim=-1).view(outputs, -1, self.group_size)
        differences = values.float().sub_(self.zeros[:, :, None])
        return differences.mul_(self.scales[:, :, None]).view(outputs, inputs)


QuantizedWeight: TypeAlias = Int8Weight | Int4Weight


def take_rows(weight: QuantizedWeight, rows: Tensor | slice) -> QuantizedWeight:
    """The weights of some outputs."""
    if isinstance(weight, Int8Weight):
        return Int8Weight(weight.values[rows], weight.scales[rows])
    return Int4Weight(weight.values[rows], weight.scales[rows], weight.zeros[rows], weight.group_size)


def stack_weights(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """One weight with the outputs of all, in order; None if their forms differ."""
    first, *others = weights
    if not others:
        return first
    int8 = [weight for weight in weights if isinstance(weight, Int8Weight)]
    if len(int8) == len(weights):
        return Int8Weight(torch.cat([weight.values for weight in int8]), torch.cat([weight.scales for weight in int8]))
    int4 = [weight for weight in weights if isinstance(weight, Int4Weight)]
    if len(int4) < len(weights) or len({weight.group_size for weight in int4}) > 1:
        return None
    return Int4Weight(
        torch.cat([weight.values for weight in int4]),
        torch.cat([weight.scales for weight in int4]),
        torch.cat([weight.zeros for weight in int4]),
        int4[0].group_size,
    )


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, num_dims: int) -> None:
    if tensor.dtype is not dtype or tensor.dim() != num_dims:
        raise ValueError(f"{name} must be {dtype} of {num_dims} dimensions, not {tensor.dtype} {list(tensor.shape)}")


def _check_inputs(inputs: int) -> None:
    if not 0 < inputs <= MAX_QUANTIZED_INPUTS:
        raise ValueError(f"a quantised weight has from 1 to {MAX_QUANTIZED_INPUTS} inputs, not {inputs}")


def _check_scales(scales: Tensor, shape: tuple[int, ...]) -> None:
    _check_tensor("scales", scales, torch.float32, len(shape))
    if scales.shape != shape:
        raise ValueError(f"scales must be {list(shape)}, not {list(scales.shape)}")
    if not bool(scales.isfinite().all()):
        raise ValueError("scales must be finite")
