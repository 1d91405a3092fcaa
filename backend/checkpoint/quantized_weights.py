"""Weights of a linear layer in 8 or 4 bits: the form between a quantiser or a file and the operations that pack them.

A weight is [outputs, inputs], row-major, like an unquantised one. A gated pair is one weight whose rows are [gate |
up].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from penstock.backend.checkpoint.float8_weight import Float8Form, Float8Weight

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_QUANTIZED_INPUTS = 1 << 17
"""127 × 128 × this is below 2^31, so a sum of products of int8 is exact in int32: activations are from -127 to 127."""

INT4_GROUP_SIZES = (32, 128)

MXFP4_GROUP_SIZE = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number that each value of 4 bits stands for."""
MXFP4_EXPONENTS = range(-23, 17)
"""Exponents that a scale may have: half of each scale is a number of binary16."""

GROUP_SIZES = (16, 32)
"""Inputs of a group of a `GroupedWeight`."""

_SCALE_BYTES_INT8 = 4
_SCALE_BYTES_INT4 = 2
_ZERO_BYTES_INT4 = 1


@dataclass(frozen=True, slots=True)
class PackedForm:
    """The form of a quantised weight, without its numbers."""

    group_size: int | None
    """Inputs that share a scale, and maybe a zero point, of 4-bit values; None for 8 bits and one scale per output."""
    has_zeros: bool = True
    """Groups of 4-bit values have zero points."""

    def num_bytes(self, shape: tuple[int, int]) -> int:
        """Memory of a packed linear [outputs, inputs]: values, scales and zeros."""
        outputs, inputs = shape
        if self.group_size is None:
            return outputs * (inputs + _SCALE_BYTES_INT8)
        group_bytes = _SCALE_BYTES_INT4 + (_ZERO_BYTES_INT4 if self.has_zeros else 0)
        return outputs * (inputs // 2 + inputs // self.group_size * group_bytes)


@dataclass(frozen=True, slots=True)
class GroupedForm:
    """The form of a `GroupedWeight`, without its numbers."""

    bits: int
    """Size of a value: 4, from 0 to 15, or 8, from -128 to 127."""
    group_size: int
    """Inputs that share a scale: one of GROUP_SIZES."""
    block_size: int
    """Inputs that share factors: those of one group or of several."""
    has_minima: bool

    @property
    def num_factors(self) -> int:
        """Scale and minimum, or only a scale."""
        return 1 + self.has_minima

    @property
    def has_multipliers(self) -> bool:
        return self.block_size > self.group_size

    def num_bytes(self, shape: tuple[int, int]) -> int:
        """As `PackedForm.num_bytes`."""
        outputs, inputs = shape
        factors = inputs // self.block_size * self.num_factors * _SCALE_BYTES_INT4
        multipliers = inputs // self.group_size * self.num_factors if self.has_multipliers else 0
        return outputs * (inputs * self.bits // 8 + factors + multipliers)


WeightForm: TypeAlias = PackedForm | GroupedForm | Float8Form


def has_cpu_kernels(form: WeightForm) -> bool:
    return not isinstance(form, Float8Form)


def common_form(forms: Iterable[WeightForm | None]) -> WeightForm | None:
    """The smallest form that holds the numbers of all these forms; None if there is none."""
    found = set(forms)
    if len(found) == 1:
        return found.pop()
    grouped = [form for form in found if isinstance(form, GroupedForm)]
    if len(grouped) < len(found) or len({form.block_size for form in grouped}) > 1:
        return None
    return GroupedForm(
        max(form.bits for form in grouped),
        min(form.group_size for form in grouped),
        grouped[0].block_size,
        any(form.has_minima for form in grouped),
    )


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
        _check_scales("scales", self.scales, (outputs,))

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        outputs, inputs = self.values.shape
        return outputs, inputs

    @property
    def form(self) -> PackedForm:
        return PackedForm(None)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """[outputs, …] each."""
        return self.values, self.scales

    def with_parts(self, *parts: Tensor) -> Int8Weight:
        return Int8Weight(*parts)

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
        _check_binary16("scales", self.scales, groups)
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

    @property
    def form(self) -> PackedForm:
        return PackedForm(self.group_size)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """[outputs, …] each."""
        return self.values, self.scales, self.zeros

    def with_parts(self, *parts: Tensor) -> Int4Weight:
        values, scales, zeros = parts
        return Int4Weight(values, scales, zeros, self.group_size)

    def dequantize(self) -> Tensor:
        """Float32 [outputs, inputs]."""
        outputs, inputs = self.shape
        values = _unpack_pairs(self.values).view(outputs, -1, self.group_size)
        differences = values.float().sub_(self.zeros[:, :, None])
        return differences.mul_(self.scales[:, :, None]).view(outputs, inputs)


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeight:
    """w = scale × value - minimum for groups of inputs, as in GGML's block types.

    A group's scale and minimum are the factors of its block, each times a multiplier if the form has multipliers.
    Raises ValueError for other shapes, dtypes or values.
    """

    form: GroupedForm
    values: Tensor
    """8 bits: int8 [outputs, inputs]. 4 bits: uint8 [outputs, inputs / 2], the low 4 bits are the even input."""
    factors: Tensor
    """float32 [outputs, blocks, num_factors]: scale, then minimum; finite numbers of binary16."""
    multipliers: Tensor
    """int8 [outputs, groups, num_factors]; [outputs, 0, num_factors] if the form has none."""

    def __post_init__(self) -> None:
        form = self.form
        _check_tensor("values", self.values, torch.int8 if form.bits == 8 else torch.uint8, 2)
        outputs, inputs = self.shape
        _check_inputs(inputs)
        if form.group_size not in GROUP_SIZES or form.block_size % form.group_size or inputs % form.block_size:
            raise ValueError(f"{inputs} inputs cannot be divided into blocks of {form.block_size}, {form.group_size}")
        _check_binary16("factors", self.factors, (outputs, inputs // form.block_size, form.num_factors))
        groups = inputs // form.group_size if form.has_multipliers else 0
        _check_tensor("multipliers", self.multipliers, torch.int8, 3)
        if self.multipliers.shape != (outputs, groups, form.num_factors):
            raise ValueError(f"multipliers must be {[outputs, groups, form.num_factors]}")

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        outputs, width = self.values.shape
        return outputs, width * 8 // self.form.bits

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """[outputs, …] each."""
        return self.values, self.factors, self.multipliers

    def with_parts(self, *parts: Tensor) -> GroupedWeight:
        return GroupedWeight(self.form, *parts)

    def integers(self) -> Tensor:
        """The values in int8, whatever their bits."""
        return self.values if self.form.bits == 8 else _unpack_pairs(self.values).view(torch.int8)

    def group_factors(self) -> Tensor:
        """float32 [outputs, groups, num_factors]: each group's scale and minimum."""
        factors = self.factors.repeat_interleave(self.form.block_size // self.form.group_size, dim=1)
        return factors.mul_(self.multipliers) if self.form.has_multipliers else factors

    def dequantize(self) -> Tensor:
        """Float32 [outputs, inputs]."""
        outputs, inputs = self.shape
        factors = self.group_factors()
        numbers = self.integers().view(outputs, -1, self.form.group_size) * factors[:, :, :1]
        if self.form.has_minima:
            numbers -= factors[:, :, 1:]
        return numbers.view(outputs, inputs)

    def widen(self, form: GroupedForm) -> GroupedWeight:
        """The same numbers in a form that `common_form` found."""
        if form == self.form:
            return self
        values = self.values if form.bits == self.form.bits else self.integers()
        multipliers = self.multipliers.repeat_interleave(self.form.group_size // form.group_size, dim=1)
        missing = (0, form.num_factors - self.form.num_factors)
        return GroupedWeight(
            form, values, torch.nn.functional.pad(self.factors, missing), torch.nn.functional.pad(multipliers, missing)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Weight:
    """w = scale × value, values in E2M1. Raises ValueError for other shapes, dtypes or scales."""

    values: Tensor
    """uint8 [outputs, inputs / 2], laid out like `Int4Weight.values`."""
    scales: Tensor
    """float32 [outputs, inputs / 32]: 2 to the power of one of MXFP4_EXPONENTS."""

    group_size = MXFP4_GROUP_SIZE

    def __post_init__(self) -> None:
        _check_tensor("values", self.values, torch.uint8, 2)
        outputs, inputs = self.shape
        _check_inputs(inputs)
        if inputs % MXFP4_GROUP_SIZE:
            raise ValueError(f"{inputs} inputs cannot be divided into groups of {MXFP4_GROUP_SIZE}")
        _check_scales("scales", self.scales, (outputs, inputs // MXFP4_GROUP_SIZE))
        # frexp has numbers from 0.5 to 1.
        numbers, exponents = torch.frexp(self.scales)
        first, last = MXFP4_EXPONENTS[0] + 1, MXFP4_EXPONENTS[-1] + 1
        if not bool(((numbers == 0.5) & (exponents >= first) & (exponents <= last)).all()):
            raise ValueError(f"scales must be powers of two from 2^{first - 1} to 2^{last - 1}")

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        outputs, half = self.values.shape
        return outputs, 2 * half

    @property
    def form(self) -> PackedForm:
        return PackedForm(MXFP4_GROUP_SIZE, has_zeros=False)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """[outputs, …] each."""
        return self.values, self.scales

    def with_parts(self, *parts: Tensor) -> Mxfp4Weight:
        return Mxfp4Weight(*parts)

    def dequantize(self) -> Tensor:
        """Float32 [outputs, inputs]."""
        codes = _unpack_pairs(self.values).view(-1, MXFP4_GROUP_SIZE)
        return torch.tensor(E2M1)[codes.int()].mul_(self.scales.reshape(-1, 1)).view(self.shape)


QuantizedWeight: TypeAlias = Int8Weight | Int4Weight | GroupedWeight | Mxfp4Weight | Float8Weight


def take_rows(weight: QuantizedWeight, rows: Tensor | slice) -> QuantizedWeight:
    """The weights of some outputs."""
    return weight.with_parts(*(part[rows] for part in weight.parts))


def stack_weights(
    weights: Iterable[QuantizedWeight | None], form: WeightForm, num_outputs: int
) -> QuantizedWeight | None:
    """Join the outputs of all weights, num_outputs together, in order; None if the form cannot hold one of them.

    The result's memory is allocated when the first weight is there; each weight is dropped before the next is
    requested.
    """
    stacked: list[Tensor] = []
    first: QuantizedWeight | None = None
    first_row = 0
    for each in weights:
        weight = None if each is None else _in_form(each, form)
        if weight is None:
            return None
        rows = weight.shape[0]
        if rows == num_outputs:
            return weight
        if first is None:
            first = weight
            stacked = [part.new_empty(num_outputs, *part.shape[1:]) for part in weight.parts]
        for target, part in zip(stacked, weight.parts, strict=True):
            target[first_row : first_row + rows] = part
        first_row += rows
    return None if first is None else first.with_parts(*stacked)


def _in_form(weight: QuantizedWeight, form: WeightForm) -> QuantizedWeight | None:
    if weight.form == form:
        return weight
    if isinstance(weight, GroupedWeight) and isinstance(form, GroupedForm):
        return weight.widen(form)
    return None


def _unpack_pairs(pairs: Tensor) -> Tensor:
    """uint8 [n, 2 × m] from [n, m]: the low 4 bits of a byte, then the high ones."""
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).view(len(pairs), -1)


def _check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, num_dims: int) -> None:
    if tensor.dtype is not dtype or tensor.dim() != num_dims:
        raise ValueError(f"{name} must be {dtype} of {num_dims} dimensions, not {tensor.dtype} {list(tensor.shape)}")


def _check_inputs(inputs: int) -> None:
    if not 0 < inputs <= MAX_QUANTIZED_INPUTS:
        raise ValueError(f"a quantised weight has from 1 to {MAX_QUANTIZED_INPUTS} inputs, not {inputs}")


def _check_scales(name: str, scales: Tensor, shape: tuple[int, ...]) -> None:
    _check_tensor(name, scales, torch.float32, len(shape))
    if scales.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, not {list(scales.shape)}")
    if not bool(scales.isfinite().all()):
        raise ValueError(f"{name} must be finite")


def _check_binary16(name: str, scales: Tensor, shape: tuple[int, ...]) -> None:
    _check_scales(name, scales, shape)
    if not torch.equal(scales.half().float(), scales):
        raise ValueError(f"{name} must be numbers of binary16: round them before the values")
