"""Weights of a linear layer in 8 or 4 bits: the form between a quantiser or a file and the operations that pack them.

A weight is [outputs, inputs], row-major, like an unquantised one. A gated pair is one weight whose rows are [gate |
up].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from penstock.backend.checkpoint.weight_forms.float8_weight import Float8Weight, check_scales, check_tensor
from penstock.backend.checkpoint.weight_forms.quantized_forms import (
    GROUP_SIZES,
    GroupedForm,
    PackedForm,
    StackedForm,
)
from penstock.backend.lazy_torch import Tensor, torch

MAX_QUANTIZED_INPUTS = 1 << 17
"""127 × 128 × this is below 2^31, so a sum of products of int8 is exact in int32: activations are from -127 to 127."""

INT4_GROUP_SIZES = (32, 128)

MXFP4_GROUP_SIZE = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number that each value of 4 bits stands for."""
MXFP4_EXPONENTS = range(-23, 17)
"""Exponents that a scale may have: half of each scale is a number of binary16."""

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The codebook "iq4" of a `GroupedWeight`."""


@dataclass(frozen=True, slots=True, eq=False)
class Int8Weight:
    """w = scale × value, with one scale per output. Raises ValueError for other shapes, dtypes or values."""

    values: Tensor
    """int8 [outputs, inputs]"""
    scales: Tensor
    """float32 [outputs], finite."""

    def __post_init__(self) -> None:
        check_tensor("values", self.values, torch.int8, 2)
        outputs, inputs = self.shape
        _check_inputs(inputs)
        check_scales("scales", self.scales, (outputs,))

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
        check_tensor("values", self.values, torch.uint8, 2)
        outputs, inputs = self.shape
        _check_inputs(inputs)
        if inputs % self.group_size:
            raise ValueError(f"{inputs} inputs cannot be divided into groups of {self.group_size}")
        groups = (outputs, inputs // self.group_size)
        _check_binary16("scales", self.scales, groups)
        check_tensor("zeros", self.zeros, torch.uint8, 2)
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
    """int8 [outputs, inputs]. Of 4 bits: uint8 [outputs, inputs / 2], the low 4 bits are the even input; less 8 without
    minima."""
    factors: Tensor
    """float32 [outputs, blocks, num_factors]: scale, then minimum; finite numbers of binary16."""
    multipliers: Tensor
    """int8 [outputs, groups, num_factors], of 2 bits from 0 to 15; [outputs, 0, num_factors] if the form has none."""

    def __post_init__(self) -> None:
        form = self.form
        check_tensor("values", self.values, torch.uint8 if form.bits == 4 else torch.int8, 2)
        outputs, inputs = self.shape
        _check_inputs(inputs)
        if form.group_size not in GROUP_SIZES or form.block_size % form.group_size or inputs % form.block_size:
            raise ValueError(f"{inputs} inputs cannot be divided into blocks of {form.block_size}, {form.group_size}")
        _check_binary16("factors", self.factors, (outputs, inputs // form.block_size, form.num_factors))
        groups = inputs // form.group_size if form.has_multipliers else 0
        check_tensor("multipliers", self.multipliers, torch.int8, 3)
        if self.multipliers.shape != (outputs, groups, form.num_factors):
            raise ValueError(f"multipliers must be {[outputs, groups, form.num_factors]}")
        if form.bits == 2 and bool((self.multipliers & -16).any()):
            raise ValueError("multipliers of values of 2 bits are from 0 to 15")

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        outputs, width = self.values.shape
        return outputs, width * 2 if self.form.bits == 4 else width

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """[outputs, …] each."""
        return self.values, self.factors, self.multipliers

    def with_parts(self, *parts: Tensor) -> GroupedWeight:
        return GroupedWeight(self.form, *parts)

    def integers(self) -> Tensor:
        """int8 [outputs, inputs]: what is multiplied by the scales."""
        if self.form.bits != 4:
            return self.values
        values = _unpack_pairs(self.values)
        if self.form.codebook:
            return torch.tensor(IQ4_VALUES, dtype=torch.int8)[values.int()]
        return values.view(torch.int8) if self.form.has_minima else values.view(torch.int8) - 8

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
        multipliers = self.multipliers.repeat_interleave(self.form.group_size // form.group_size, dim=1)
        missing = (0, form.num_factors - self.form.num_factors)
        return GroupedWeight(
            form,
            self.integers(),
            torch.nn.functional.pad(self.factors, missing),
            torch.nn.functional.pad(multipliers, missing),
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
        check_tensor("values", self.values, torch.uint8, 2)
        outputs, inputs = self.shape
        _check_inputs(inputs)
        if inputs % MXFP4_GROUP_SIZE:
            raise ValueError(f"{inputs} inputs cannot be divided into groups of {MXFP4_GROUP_SIZE}")
        check_scales("scales", self.scales, (outputs, inputs // MXFP4_GROUP_SIZE))
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


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight:
    """Rows of blocks of one of GGML's types, as a file has them. Kernels of the CPU pack them; others decode them."""

    form: PackedForm | GroupedForm
    """The form of `decode`'s result."""
    type_number: int
    """In GGML."""
    blocks: Tensor
    """uint8 [outputs, bytes], contiguous"""
    inputs: int
    read: Callable[[Tensor], SimpleWeight]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.blocks), self.inputs

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.blocks,)

    def with_parts(self, *parts: Tensor) -> BlockWeight:
        return replace(self, blocks=parts[0])

    def decode(self) -> SimpleWeight:
        return self.read(self.blocks)

    def dequantize(self) -> Tensor:
        return self.decode().dequantize()


@dataclass(frozen=True, slots=True, eq=False)
class StackedWeight:
    """Weights in different forms, whose outputs follow each other."""

    weights: tuple[SimpleWeight, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return sum(weight.shape[0] for weight in self.weights), self.weights[0].shape[1]

    @property
    def form(self) -> StackedForm:
        return StackedForm(tuple((weight.form, weight.shape[0]) for weight in self.weights))

    def dequantize(self) -> Tensor:
        """Float32 [outputs, inputs]."""
        return torch.cat([weight.dequantize() for weight in self.weights])


SimpleWeight: TypeAlias = Int8Weight | Int4Weight | GroupedWeight | Mxfp4Weight | Float8Weight | BlockWeight
QuantizedWeight: TypeAlias = SimpleWeight | StackedWeight


def _unpack_pairs(pairs: Tensor) -> Tensor:
    """uint8 [n, 2 × m] from [n, m]: the low 4 bits of a byte, then the high ones."""
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).view(len(pairs), -1)


def _check_inputs(inputs: int) -> None:
    if not 0 < inputs <= MAX_QUANTIZED_INPUTS:
        raise ValueError(f"a quantised weight has from 1 to {MAX_QUANTIZED_INPUTS} inputs, not {inputs}")


def _check_binary16(name: str, scales: Tensor, shape: tuple[int, ...]) -> None:
    check_scales(name, scales, shape)
    if not torch.equal(scales.half().float(), scales):
        raise ValueError(f"{name} must be numbers of binary16: round them before the values")
