"""Weights of a linear layer in 8-bit floats; `quantized_weights.py` has those in integers."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.backend.lazy_torch import Tensor, torch

FLOAT8_GROUP_SIZE = 128
"""Inputs of a group that kernels can multiply."""
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Float8Form:
    """The form of a `Float8Weight`, without its numbers."""

    group_size: int | None
    """Inputs that share a scale; None for one scale per output."""

    def num_groups(self, inputs: int) -> int:
        return 1 if self.group_size is None else -(-inputs // self.group_size)

    def num_bytes(self, shape: tuple[int, int]) -> int:
        """Memory of a packed linear, as in `PackedForm.num_bytes`."""
        outputs, inputs = shape
        return outputs * (inputs + self.num_groups(inputs) * _SCALE_BYTES)


@dataclass(frozen=True, slots=True, eq=False)
class Float8Weight:
    """w = scale × value, values in E4M3. Raises ValueError for other shapes, dtypes or scales."""

    values: Tensor
    """uint8 [outputs, inputs], the bits."""
    scales: Tensor
    """float32 [outputs, groups], finite. The last group may be smaller."""
    group_size: int | None
    """Inputs that share a scale, as in `Float8Form`."""

    def __post_init__(self) -> None:
        check_tensor("values", self.values, torch.uint8, 2)
        check_scales("scales", self.scales, (self.shape[0], self.form.num_groups(self.shape[1])))

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        outputs, inputs = self.values.shape
        return outputs, inputs

    @property
    def form(self) -> Float8Form:
        return Float8Form(self.group_size)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """[outputs, …] each."""
        return self.values, self.scales

    def with_parts(self, *parts: Tensor) -> Float8Weight:
        values, scales = parts
        return Float8Weight(values, scales, self.group_size)

    def dequantize(self) -> Tensor:
        """Float32 [outputs, inputs]."""
        inputs = self.values.shape[1]
        scales = self.scales.repeat_interleave(self.group_size or inputs, dim=1)[:, :inputs]
        return self.values.view(torch.float8_e4m3fn).float().mul_(scales)


def check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, num_dims: int) -> None:
    """Raises ValueError."""
    if tensor.dtype is not dtype or tensor.dim() != num_dims:
        raise ValueError(f"{name} must be {dtype} of {num_dims} dimensions, not {tensor.dtype} {list(tensor.shape)}")


def check_scales(name: str, scales: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless they are finite fp32 numbers of this shape."""
    check_tensor(name, scales, torch.float32, len(shape))
    if scales.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}, not {list(scales.shape)}")
    if not bool(scales.isfinite().all()):
        raise ValueError(f"{name} must be finite")
