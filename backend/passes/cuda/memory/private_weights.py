"""The interface of memory for packed weights, and the memory that ends with the process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

    from penstock.backend.checkpoint.weight_forms.quantized_forms import WeightForm


class DeviceMemory(Protocol):
    """Gives each weight its place, one after the other. Callers of filled memory get the same weights in the same
    order."""

    @property
    def is_filled(self) -> bool:
        """Weights are already there: the callers have shapes without content."""

    def place(self, make: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the tensor of this shape and dtype, which `make` returns on the device. Filled memory does not call
        it. Raises SharedWeightsError if other weights are there, and DeviceError."""

    def place_parts(self, form: WeightForm, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Place a quantised weight's parts; not in filled memory."""

    def find_parts(self) -> tuple[WeightForm, tuple[Tensor, ...]] | None:
        """The next weight, if it is quantised; only of filled memory. Raises SharedWeightsError if there is none."""

    def unmap(self) -> None:
        """Call when nothing uses the weights any more."""


class PrivateMemory:
    """Implements `DeviceMemory`: torch's memory, freed with the tensors."""

    is_filled = False

    def place(self, make: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        return make()

    def place_parts(self, form: WeightForm, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:  # noqa: ARG002
        return parts

    def find_parts(self) -> None:
        raise TypeError("nothing is found in memory that only this process has; this is a bug")

    def unmap(self) -> None:
        """There is nothing to unmap."""
