"""One safetensors file: checks its header against the file's size and copies tensors out through a moving window.

The format: 8 bytes little-endian header length, the header (JSON: name → dtype, shape, data_offsets), then the data.
The safetensors package maps the whole file, so while a tensor is copied its memory counts twice; an embedding is often
a quarter of a model. Here at most WINDOW_BYTES are mapped at a time, at the same speed.
"""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from msgspec import Meta, Struct

from penstock.backend.checkpoint.json_file import convert, decode_json_object
from penstock.backend.checkpoint.layout import as_text_names
from penstock.backend.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import BinaryIO

    from torch import Tensor

WINDOW_BYTES = 8 << 20
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

_LENGTH_BYTES = 8
FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_COPIED_DTYPES = FLOAT_DTYPES | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
_ITEM_BYTES = {name: dtype.itemsize for name, dtype in _COPIED_DTYPES.items()} | {
    "F64": 8, "U64": 8, "U32": 4, "I16": 2, "U16": 2, "BOOL": 1, "F8_E5M2": 1
}  # fmt: skip

_Size = Annotated[int, Meta(ge=0, le=1 << 48)]


class _HeaderEntry(Struct, frozen=True):
    dtype: str
    shape: Annotated[tuple[_Size, ...], Meta(max_length=8)]
    data_offsets: tuple[_Size, _Size]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of a tensor. first_byte counts from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    first_byte: int
    num_bytes: int

    def rows(self, first: int, count: int) -> StoredTensor:
        """Consecutive rows of a matrix."""
        row_bytes = self.num_bytes // self.shape[0]
        return StoredTensor(
            self.dtype, (count, *self.shape[1:]), self.first_byte + first * row_bytes, count * row_bytes
        )


class SafetensorsFile:
    """An open file. All tensors of its header are within it, under their `as_text_names`. The caller closes it."""

    def __init__(self, path: Path) -> None:
        """Raises StartupError if the file is missing or truncated, or its header is invalid."""
        self.path = path
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise StartupError(f"{path} cannot be opened: {error.strerror}") from None
        try:
            stored, self.metadata = _read_header(self._file, path)
            self.tensors = as_text_names(stored, path)
        except BaseException:
            self._file.close()
            raise

    def copy(self, tensor: StoredTensor, target: Tensor, advance: Callable[[int], None]) -> None:
        """Copy a tensor of floats or bytes into target (contiguous, as many elements), converting to its dtype.

        Calls advance with the number of stored bytes after each window.
        """
        source_dtype = _COPIED_DTYPES[tensor.dtype]
        item_bytes = _ITEM_BYTES[tensor.dtype]
        flat = target.view(-1)
        window_items = WINDOW_BYTES // item_bytes
        for start in range(0, flat.numel(), window_items):
            count = min(window_items, flat.numel() - start)
            first_byte = tensor.first_byte + start * item_bytes
            lead = first_byte % mmap.ALLOCATIONGRANULARITY
            # A private copy-on-write mapping: torch wants a writable buffer, and nothing here writes to it.
            with mmap.mmap(
                self._file.fileno(), lead + count * item_bytes, access=mmap.ACCESS_COPY, offset=first_byte - lead
            ) as window:
                window.madvise(mmap.MADV_WILLNEED)
                flat[start : start + count].copy_(
                    torch.frombuffer(window, dtype=source_dtype, count=count, offset=lead)
                )
            advance(count * item_bytes)

    def read(self, tensor: StoredTensor, advance: Callable[[int], None]) -> Tensor:
        """As `copy`, to a new tensor of the stored dtype and shape."""
        target = torch.empty(tensor.shape, dtype=_COPIED_DTYPES[tensor.dtype])
        self.copy(tensor, target, advance)
        return target

    def map(self, tensor: StoredTensor) -> Tensor:
        """A float tensor in its own dtype and shape, mapped from the file: private, and alive as long as it is held.

        What is read of it counts as resident, but the kernel may drop it and read it again.
        """
        lead = tensor.first_byte % mmap.ALLOCATIONGRANULARITY
        mapping = mmap.mmap(
            self._file.fileno(),
            lead + tensor.num_bytes,
            access=mmap.ACCESS_COPY,
            offset=tensor.first_byte - lead,
        )
        count = math.prod(tensor.shape)
        return torch.frombuffer(mapping, dtype=FLOAT_DTYPES[tensor.dtype], count=count, offset=lead).view(tensor.shape)

    def close(self) -> None:
        """Tensors that were mapped stay valid."""
        self._file.close()


def _read_header(file: BinaryIO, path: Path) -> tuple[dict[str, StoredTensor], object]:
    """The tensors, and what the writer said about the file, which is not checked."""
    file_bytes = os.fstat(file.fileno()).st_size
    if file_bytes < _LENGTH_BYTES:
        raise StartupError(f"{path} is truncated: expected at least {_LENGTH_BYTES} bytes, found {file_bytes}")
    header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise StartupError(
            f"{path} is not a safetensors file: a header of {header_bytes} bytes is over {MAX_HEADER_BYTES} bytes"
        )
    data_start = _LENGTH_BYTES + header_bytes
    if file_bytes < data_start:
        raise StartupError(f"{path} is truncated: expected at least {data_start} bytes, found {file_bytes}")
    header = decode_json_object(file.read(header_bytes), f"{path}: the header")
    metadata = header.pop("__metadata__", None)
    tensors = {name: _stored(name, entry, data_start, path) for name, entry in header.items()}
    expected_bytes = max((t.first_byte + t.num_bytes for t in tensors.values()), default=data_start)
    if file_bytes < expected_bytes:
        raise StartupError(f"{path} is truncated: expected {expected_bytes} bytes, found {file_bytes}")
    _check_apart(tensors, path)
    return tensors, metadata


def _check_apart(tensors: dict[str, StoredTensor], path: Path) -> None:
    """Raises StartupError if two tensors share bytes."""
    end, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].first_byte, item[1].num_bytes)):
        if tensor.num_bytes and tensor.first_byte < end:
            raise StartupError(
                f"{path}: tensor {name} begins at byte {tensor.first_byte}, within {before}, which ends at {end}"
            )
        end, before = max(end, tensor.first_byte + tensor.num_bytes), name


def _stored(name: str, entry: object, data_start: int, path: Path) -> StoredTensor:
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict):
        raise StartupError(f"{where} is not described by an object")
    checked = convert(entry, _HeaderEntry, where)
    begin, end = checked.data_offsets
    item_bytes = _ITEM_BYTES.get(checked.dtype)
    if end < begin or (item_bytes is not None and end - begin != math.prod(checked.shape) * item_bytes):
        raise StartupError(
            f"{where} of dtype {checked.dtype} and shape {list(checked.shape)} "
            f"does not fit its data_offsets {begin} to {end}"
        )
    return StoredTensor(checked.dtype, checked.shape, data_start + begin, end - begin)
