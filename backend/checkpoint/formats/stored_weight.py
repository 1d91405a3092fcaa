"""A tensor of a checkpoint, plain or in a format of its own: checked when it is found, read when it is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from penstock.backend.checkpoint.formats.matrix_format import MAX_NOTE_BYTES, UnreadableMatrixError
from penstock.backend.checkpoint.formats.tensor_file import FLOAT_DTYPES
from penstock.backend.checkpoint.json_file import shorten
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor

    from penstock.backend.checkpoint.formats.matrix_format import MatrixFormat, Parts, Shape
    from penstock.backend.checkpoint.formats.tensor_file import StoredTensor, TensorFile
    from penstock.backend.checkpoint.quantized_weights import QuantizedWeight
    from penstock.backend.checkpoint.tensors import TensorSpec

    Advance = Callable[[int], None]
    """Receives the number of stored bytes that were read."""

_BLOCK_VALUES = 1 << 20
"""Weights that are dequantised at a time: 4 MiB in fp32."""
_WEIGHT = ".weight"


class StoredWeight(Protocol):
    """A tensor that has the shape that the model needs."""

    @property
    def num_bytes(self) -> int:
        """In the file."""
        ...

    def copy(self, target: Tensor, advance: Advance) -> None:
        """Write the whole tensor to target (contiguous, of the same shape), in its dtype."""
        ...

    def blocks(self, max_values: int, advance: Advance) -> Iterator[Tensor]:
        """A matrix in blocks of whole rows, fp32, of at most max_values numbers, but at least one row."""
        ...


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """Floats."""

    file: TensorFile
    stored: StoredTensor

    @property
    def num_bytes(self) -> int:
        return self.stored.num_bytes

    @property
    def dtype(self) -> torch.dtype:
        return FLOAT_DTYPES[self.stored.dtype]

    def copy(self, target: Tensor, advance: Advance) -> None:
        self.file.copy(self.stored, target, advance)

    def blocks(self, max_values: int, advance: Advance) -> Iterator[Tensor]:
        for rows in _row_blocks(self.stored.shape, max_values):
            block = torch.empty(rows.stop - rows.start, *self.stored.shape[1:])
            self.file.copy(self.stored.rows(rows.start, len(block)), block, advance)
            yield block

    def map(self) -> Tensor:
        """As `TensorFile.map`."""
        return self.file.map(self.stored)


@dataclass(frozen=True, slots=True)
class LoadedMatrix:
    """The stored parts of a matrix, in memory and checked."""

    format: MatrixFormat
    shape: Shape
    parts: Parts

    def pack(self) -> QuantizedWeight | None:
        return self.format.pack(self.parts, self.shape)

    def copy(self, target: Tensor) -> None:
        """Dequantise to target [outputs, inputs]."""
        for rows in _row_blocks(self.shape, _BLOCK_VALUES):
            target[rows] = self.format.expand(self.parts, self.shape, rows)


@dataclass(frozen=True, slots=True)
class FormattedMatrix:
    """A linear's weight in a quantised format. Its parts are read whole."""

    name: str
    """Of the weight in an unquantised checkpoint."""
    format: MatrixFormat
    shape: Shape
    stored: Mapping[str, PlainTensor]
    """By the part's name."""

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.stored.values())

    def load(self, advance: Advance) -> LoadedMatrix:
        """Raises StartupError for numbers that the format does not allow, or scales that are not finite."""
        parts = {name: part.file.read(part.stored, advance) for name, part in self.stored.items()}
        for name, tensor in parts.items():
            if tensor.dtype in FLOAT_DTYPES.values() and not bool(tensor.isfinite().all()):
                raise StartupError(f"tensor {_part_name(self.name, name)} has numbers that are not finite")
        try:
            self.format.check(parts, self.shape)
        except UnreadableMatrixError as error:
            raise StartupError(f"tensor {self.name}, {self.format.description}: {error}") from None
        return LoadedMatrix(self.format, self.shape, parts)

    def copy(self, target: Tensor, advance: Advance) -> None:
        self.load(advance).copy(target)

    def blocks(self, max_values: int, advance: Advance) -> Iterator[Tensor]:
        loaded = self.load(advance)
        for rows in _row_blocks(self.shape, max_values):
            yield self.format.expand(loaded.parts, self.shape, rows)


def find_weight(
    spec: TensorSpec, matrix: MatrixFormat | None, files: Mapping[str, TensorFile], where: str
) -> StoredWeight:
    """The tensor in the files (tensor name → file), which where describes. matrix is the format of a quantised one.

    Raises StartupError with the tensor's name if it, or a part of it, is missing or has another shape or dtype.
    """
    if matrix is None:
        return _find(spec.name, (spec.shape,), tuple(FLOAT_DTYPES), "config.json", files, where)
    shape = (spec.shape[0], spec.shape[1])
    try:
        parts = matrix.parts(shape)
    except UnreadableMatrixError as error:
        raise StartupError(f"tensor {spec.name}, {matrix.description}: {error}") from None
    stored = {
        name: _find(
            _part_name(spec.name, name), part.shapes, part.dtypes, f"{matrix.description} in config.json", files, where
        )
        for name, part in parts.items()
        if not part.optional or _part_name(spec.name, name) in files
    }
    return FormattedMatrix(spec.name, matrix, shape, stored)


def _find(
    name: str,
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[str, ...],
    source: str,
    files: Mapping[str, TensorFile],
    where: str,
) -> PlainTensor:
    """source: what decides about the shape."""
    expected = list(shapes[0]) if shapes else f"[up to {MAX_NOTE_BYTES}]"
    if name not in files:
        raise StartupError(f"tensor {name}, expected with shape {expected}, is missing from {where}")
    file = files[name]
    stored = file.tensors[name]
    fits = stored.shape in shapes if shapes else len(stored.shape) == 1 and stored.num_bytes <= MAX_NOTE_BYTES
    if not fits:
        raise StartupError(f"{file.path}: tensor {name} has shape {list(stored.shape)}; {source} makes it {expected}")
    if stored.dtype not in dtypes:
        raise StartupError(
            f"{file.path}: tensor {name} has dtype {shorten(stored.dtype)}; it must be {', '.join(dtypes)}"
        )
    return PlainTensor(file, stored)


def _part_name(weight: str, part: str) -> str:
    return f"{weight.removesuffix(_WEIGHT)}.{part}"


def _row_blocks(shape: tuple[int, ...], max_values: int) -> Iterator[slice]:
    """Consecutive rows of a matrix."""
    outputs, inputs = shape
    step = max(1, max_values // inputs)
    for first in range(0, outputs, step):
        yield slice(first, min(first + step, outputs))
