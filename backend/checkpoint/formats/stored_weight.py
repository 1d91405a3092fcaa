"""A tensor of a checkpoint, plain or quantised: checked when it is found, read when it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.backend.checkpoint.config.tensors import ExpertSlice, TensorSpec
from penstock.backend.checkpoint.files.json_file import shorten
from penstock.backend.checkpoint.formats.matrix_format import (
    BLOCK_VALUES,
    MAX_NOTE_BYTES,
    MatrixFormat,
    Part,
    Parts,
    Shape,
    UnreadableMatrixError,
    row_blocks,
)
from penstock.backend.checkpoint.formats.tensor_file import FLOAT_DTYPES, StoredTensor, TensorFile
from penstock.backend.checkpoint.weight_forms.quantized_weights import QuantizedWeight
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from penstock.backend.lazy_torch import Tensor, torch

Advance = Callable[[int], None]
"""Receives the number of stored bytes that were read."""

_WEIGHT = ".weight"


class StoredWeight(Protocol):
    """A tensor that has the shape that the model needs."""

    @property
    def names(self) -> Iterable[str]:
        """The stored tensors that it is made of."""

    @property
    def num_bytes(self) -> int:
        """Size in the file."""

    def copy(self, target: Tensor, advance: Advance) -> None:
        """Write the whole tensor to target (contiguous, same shape), converted to its dtype."""

    def blocks(self, max_values: int, advance: Advance) -> Iterator[Tensor]:
        """A matrix in blocks of whole rows, fp32, of at most max_values numbers, but at least one row."""


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A tensor of floats."""

    name: str
    file: TensorFile
    stored: StoredTensor

    @property
    def names(self) -> Iterable[str]:
        return (self.name,)

    @property
    def num_bytes(self) -> int:
        return self.stored.num_bytes

    @property
    def dtype(self) -> Dtype:
        return FLOAT_DTYPES[self.stored.dtype]

    def read(self, advance: Advance) -> Tensor:
        """Return the tensor in its stored dtype."""
        return self.file.read(self.stored, advance)

    def copy(self, target: Tensor, advance: Advance) -> None:
        self.file.copy(self.stored, target, advance)

    def blocks(self, max_values: int, advance: Advance) -> Iterator[Tensor]:
        for rows in row_blocks(self.stored.shape, max_values):
            block = torch.empty(rows.stop - rows.start, *self.stored.shape[1:])
            self.file.copy(self.stored.rows(rows.start, len(block)), block, advance)
            yield block


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One expert's slice of a tensor of all experts: a matrix or bias of floats, or a part of a quantised matrix."""

    whole: PlainTensor
    place: ExpertSlice
    inputs_first: bool
    """The slice is [inputs, outputs]."""

    @property
    def names(self) -> Iterable[str]:
        return self.whole.names

    @property
    def num_bytes(self) -> int:
        return self.whole.num_bytes // self.place.count

    def read(self, advance: Advance) -> Tensor:
        """[outputs, …] in the stored dtype: the outputs of gate, then those of up."""
        (own,) = self.whole.file.read(self.whole.stored.rows(self.place.index, 1), advance)
        outputs: Tensor = own.T if self.inputs_first else own
        return torch.cat([outputs[0::2], outputs[1::2]]) if self.place.takes_turns else outputs

    def copy(self, target: Tensor, advance: Advance) -> None:
        target.copy_(self.read(advance))

    def blocks(self, max_values: int, advance: Advance) -> Iterator[Tensor]:
        matrix = self.read(advance)
        for rows in row_blocks(matrix.shape, max_values):
            yield matrix[rows].float()


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
        for rows in row_blocks(self.shape, BLOCK_VALUES):
            target[rows] = self.format.expand(self.parts, self.shape, rows)


@dataclass(frozen=True, slots=True)
class FormattedMatrix:
    """A linear's weight in a quantised format. Its parts are read whole."""

    name: str
    """The weight's name in an unquantised checkpoint, with the expert's number if the expert has no tensor
    of its own."""
    format: MatrixFormat
    shape: Shape
    stored: Mapping[str, PlainTensor | ExpertTensor]
    """Stored tensors by the part's name."""

    @property
    def names(self) -> Iterable[str]:
        return (name for part in self.stored.values() for name in part.names)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.stored.values())

    def load(self, advance: Advance) -> LoadedMatrix:
        """Raises StartupError for numbers that the format does not allow, or scales that are not finite."""
        parts = {name: part.read(advance) for name, part in self.stored.items()}
        for name, tensor in parts.items():
            if tensor.is_floating_point() and tensor.itemsize > 1 and not bool(tensor.isfinite().all()):
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
        for rows in row_blocks(self.shape, max_values):
            yield self.format.expand(loaded.parts, self.shape, rows)


def find_weight(
    spec: TensorSpec, matrix: MatrixFormat | None, files: Mapping[str, TensorFile], where: str
) -> StoredWeight:
    """Find the tensor in the files (tensor name → file); where describes the files. matrix is the format if it is
    quantised.

    Raises StartupError with the tensor's name if it, or a part of it, is missing or has another shape or dtype.
    """
    place = spec.place
    if matrix is None:
        return _find(_plain_part(spec), spec.stored_name, "config.json", place, files, where)
    shape = (spec.shape[0], spec.shape[1])
    try:
        parts = matrix.parts(shape)
    except UnreadableMatrixError as error:
        raise StartupError(f"tensor {spec.stored_name}, {matrix.description}: {error}") from None
    names = {part: _part_name(spec.name, part) if place is None else place.part_name(part) for part in parts}
    source = f"{matrix.description} in config.json"
    stored = {
        part: _find(parts[part], name, source, place, files, where)
        for part, name in names.items()
        if not parts[part].optional or name in files
    }
    name = spec.name if place is None else f"{place.tensor} of expert {place.index}"
    return FormattedMatrix(name, matrix, shape, stored)


def _plain_part(spec: TensorSpec) -> Part:
    """A part of a plain weight. Matrices of all experts are [experts, inputs, outputs] or, if their place allows it,
    [experts, outputs, inputs], which is the last shape."""
    shapes = [spec.shape if spec.place is None else spec.shape[::-1]]
    if spec.place is not None and spec.place.may_have_outputs_first:
        shapes.append(spec.shape)
    return Part(tuple(shapes), tuple(FLOAT_DTYPES))


def _find(
    part: Part, name: str, source: str, place: ExpertSlice | None, files: Mapping[str, TensorFile], where: str
) -> PlainTensor | ExpertTensor:
    """Find a part. source names the setting that determines its shape. With a place, the part is an expert's."""
    shapes = part.shapes if place is None else tuple((place.count, *shape) for shape in part.shapes)
    expected = list(shapes[0]) if shapes else f"[up to {MAX_NOTE_BYTES}]"
    if name not in files:
        raise StartupError(f"tensor {name}, expected with shape {expected}, is missing from {where}")
    file = files[name]
    stored = file.tensors[name]
    fits = stored.shape in shapes if shapes else len(stored.shape) == 1 and stored.num_bytes <= MAX_NOTE_BYTES
    if not fits:
        raise StartupError(f"{file.path}: tensor {name} has shape {list(stored.shape)}; {source} makes it {expected}")
    if stored.dtype not in part.dtypes:
        raise StartupError(
            f"{file.path}: tensor {name} has dtype {shorten(stored.dtype)}; it must be {', '.join(part.dtypes)}"
        )
    plain = PlainTensor(name, file, stored)
    if place is None:
        return plain
    if place.may_have_outputs_first and len(stored.shape) == 3 and stored.shape[1] == stored.shape[2]:
        raise StartupError(
            f"{file.path}: tensor {name} has shape {list(stored.shape)}, which does not tell inputs from outputs"
        )
    outputs_first = place.may_have_outputs_first and stored.shape == shapes[-1]
    return ExpertTensor(
        plain, place, inputs_first=stored.dtype in FLOAT_DTYPES and len(stored.shape) > 2 and not outputs_first
    )


def _part_name(weight: str, part: str) -> str:
    return f"{weight.removesuffix(_WEIGHT)}.{part}"
