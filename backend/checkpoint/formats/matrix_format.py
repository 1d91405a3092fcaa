"""The interface of a format of linears' weights: the tensors that store it, and the numbers that they encode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from penstock.backend.checkpoint.weight_forms.quantized_forms import WeightForm
from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
from penstock.backend.lazy_torch import Tensor

Shape: TypeAlias = tuple[int, int]
"""(outputs, inputs)"""

Parts: TypeAlias = Mapping[str, Tensor]
"""Stored tensors, by the part of their name after the linear's."""

BLOCK_VALUES = 1 << 20
"""Weights that are dequantised or repacked at a time: 4 MiB in fp32."""
MAX_NOTE_BYTES = 4096
FLOATS = ("F32", "F16", "BF16")


class UnreadableMatrixError(ValueError):
    """A matrix that contradicts its format. The message does not name the matrix."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that a format stores."""

    shapes: tuple[tuple[int, ...], ...]
    """The shapes that it may have, the usual one first. Empty: one dimension of at most MAX_NOTE_BYTES."""
    dtypes: tuple[str, ...]
    """Names in safetensors."""
    optional: bool = False


class MatrixFormat(Protocol):
    """How the weights of linears are stored. It holds settings only; the same object serves many linears."""

    @property
    def description(self) -> str:
        """Method, bits and groups, for messages."""

    def parts(self, shape: Shape) -> dict[str, Part]:
        """The tensors of a linear of this shape, [outputs, inputs].

        Raises UnreadableMatrixError if the format's sizes do not divide the shape.
        """

    def check(self, parts: Parts, shape: Shape) -> None:  # noqa: ARG002 - a default
        """Raises UnreadableMatrixError for numbers that the format does not allow; by default it allows any."""
        return

    def expand(self, parts: Parts, shape: Shape, rows: slice) -> Tensor:
        """The weights of some outputs, float32 [rows, inputs]. rows has start and stop, and no step."""

    def packed_form(self, shape: Shape) -> WeightForm | None:  # noqa: ARG002 - a default
        """The form that `pack` returns for most linears of this shape; None, the default, if there is none."""
        return None

    def pack(self, parts: Parts, shape: Shape) -> QuantizedWeight | None:  # noqa: ARG002 - a default
        """The same numbers in a form that kernels multiply; None, the default, if there is none."""
        return None


def check_multiple(what: str, size: int, divisor: int, name: str) -> None:
    """Raises UnreadableMatrixError."""
    if size % divisor:
        raise UnreadableMatrixError(f"{size} {what} are not a multiple of {name}, {divisor}")


def check_range(name: str, indices: Tensor, count: int) -> None:
    """Raises UnreadableMatrixError unless all indices are from 0 to count - 1."""
    for index in (int(indices.min()), int(indices.max())):
        if not 0 <= index < count:
            raise UnreadableMatrixError(f"{name} has {index}; it must be from 0 to {count - 1}")


def row_blocks(shape: tuple[int, ...], max_values: int) -> Iterator[slice]:
    """Consecutive rows of a matrix: at most max_values numbers, but at least one row."""
    outputs, inputs = shape
    step = max(1, max_values // inputs)
    for first in range(0, outputs, step):
        yield slice(first, min(first + step, outputs))
