"""Forms of quantised weights, without their numbers: what a value, a group and a block have, and how many bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from penstock.backend.checkpoint.weight_forms.float8_weight import Float8Form

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
    """Size of a value: 2 to 6, from 0 on if there are minima and else from -2^(bits - 1) on; or 8, from -128 to 127."""
    group_size: int
    """Inputs that share a scale: one of GROUP_SIZES."""
    block_size: int
    """Inputs that share factors: those of one group or of several."""
    has_minima: bool
    codebook: Literal["", "iq4"] = ""
    """The numbers that the values stand for, if these are not integers: IQ4_VALUES."""

    @property
    def num_factors(self) -> int:
        """Scale and minimum, or only a scale."""
        return 1 + self.has_minima

    @property
    def has_multipliers(self) -> bool:
        return self.block_size > self.group_size

    def num_bytes(self, shape: tuple[int, int]) -> int:
        outputs, inputs = shape
        factors = inputs // self.block_size * self.num_factors * _SCALE_BYTES_INT4
        multipliers = self.has_multipliers * inputs // self.group_size * (1 if self.bits == 2 else self.num_factors)
        return outputs * (inputs * self.bits // 8 + factors + multipliers)


@dataclass(frozen=True, slots=True)
class StackedForm:
    """The form of a `StackedWeight`."""

    parts: tuple[tuple[WeightForm, int], ...]
    """Forms and numbers of outputs."""

    group_size = None

    def num_bytes(self, shape: tuple[int, int]) -> int:
        return sum(form.num_bytes((outputs, shape[1])) for form, outputs in self.parts)


WeightForm: TypeAlias = PackedForm | GroupedForm | Float8Form | StackedForm
