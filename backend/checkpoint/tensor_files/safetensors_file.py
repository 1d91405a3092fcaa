"""One safetensors file: checks its header against the file's size.

The format: 8 bytes little-endian header length, the header (JSON: name → dtype, shape, data_offsets), then the data.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, BinaryIO

from msgspec import Meta, Struct

from penstock.backend.checkpoint.files.json_file import convert, decode_without_twins
from penstock.backend.checkpoint.files.layout import as_text_names
from penstock.backend.checkpoint.formats.tensor_file import ITEM_BYTES, StoredTensor, TensorFile, check_apart, open_file
from penstock.backend.errors import StartupError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

_LENGTH_BYTES = 8
_Size = Annotated[int, Meta(ge=0, le=1 << 48)]


class _HeaderEntry(Struct, frozen=True):
    dtype: str
    shape: Annotated[tuple[_Size, ...], Meta(max_length=8)]
    data_offsets: tuple[_Size, _Size]


class SafetensorsFile(TensorFile):
    """A file whose tensors have their `as_text_names`."""

    def __init__(self, path: Path) -> None:
        """Raises StartupError if the file is missing or truncated, or its header is invalid."""
        file = open_file(path)
        try:
            stored, self.metadata = _read_header(file, path)
            tensors = as_text_names(stored, path)
        except BaseException:
            file.close()
            raise
        super().__init__(path, file, tensors)


def _read_header(file: BinaryIO, path: Path) -> tuple[dict[str, StoredTensor], object]:
    """Return the tensors, and the writer's metadata, which are not checked."""
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
    header = decode_without_twins(file.read(header_bytes), f"{path}: the header")
    metadata = header.pop("__metadata__", None)
    tensors = {name: _stored(name, entry, data_start, path) for name, entry in header.items()}
    expected_bytes = max((t.first_byte + t.num_bytes for t in tensors.values()), default=data_start)
    if file_bytes < expected_bytes:
        raise StartupError(f"{path} is truncated: expected {expected_bytes} bytes, found {file_bytes}")
    check_apart(tensors, path)
    return tensors, metadata


def _stored(name: str, entry: object, data_start: int, path: Path) -> StoredTensor:
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict):
        raise StartupError(f"{where} is not described by an object")
    checked = convert(entry, _HeaderEntry, where)
    begin, end = checked.data_offsets
    item_bytes = ITEM_BYTES.get(checked.dtype)
    if end < begin or (item_bytes is not None and end - begin != math.prod(checked.shape) * item_bytes):
        raise StartupError(
            f"{where} of dtype {checked.dtype} and shape {list(checked.shape)} "
            f"does not fit its data_offsets {begin} to {end}"
        )
    return StoredTensor(checked.dtype, checked.shape, data_start + begin, end - begin)
