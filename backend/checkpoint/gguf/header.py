"""The header of a GGUF file: metadata, and the places of the tensors. Everything is checked before it is used.

The format (version 2 and 3, little-endian): magic, version, numbers of tensors and of metadata keys, the metadata, the
tensors' names, dimensions, types and offsets, then padding and the data. A count or length that exceeds the rest of the
file is refused before anything of its size is allocated.
"""

from __future__ import annotations

import mmap
import os
import struct
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.backend.checkpoint.files.json_file import shorten
from penstock.backend.checkpoint.formats.numbers.ggml import BLOCK_TYPES
from penstock.backend.checkpoint.formats.tensor_file import FLOAT_DTYPES, StoredTensor, TensorFile, check_apart
from penstock.backend.checkpoint.formats.tensor_file import open_file as open_binary
from penstock.backend.errors import StartupError

MAX_HEADER_BYTES = 1 << 28
MAX_ARRAY_ITEMS = 1 << 22
MAX_NAME_BYTES = 512
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_SIZE = 1 << 48
_LENGTH = struct.Struct("<Q")

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type number of a metadata value → its code in struct."""
_STRING, _ARRAY = 8, 9
_SMALLEST_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
_SMALLEST_KEY_BYTES = 8 + 4 + 1

TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""GGML's numbers of tensor types."""
SUPPORTED_TYPES = (*FLOAT_DTYPES, *BLOCK_TYPES)


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's place. shape is torch's: rows first."""

    type_name: str
    shape: tuple[int, ...]
    stored: StoredTensor
    """Floats, or rows of bytes."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata values are numbers, booleans, strings and lists of these; lists are empty if arrays were skipped."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_header(path: Path, *, keeps_arrays: bool = True) -> GgufHeader:
    """Raises StartupError naming the key or tensor, what was expected and what was found."""
    return _read(path, keeps_arrays=keeps_arrays)


def open_tensors(path: Path) -> TensorFile:
    """Open the file's tensors under their GGUF names; blocks have dtype U8. Raises StartupError."""
    header = _read(path, keeps_arrays=False)
    return TensorFile(path, open_binary(path), {name: tensor.stored for name, tensor in header.tensors.items()})


def _read(path: Path, *, keeps_arrays: bool) -> GgufHeader:
    with closing(open_binary(path)) as file:
        if not os.fstat(file.fileno()).st_size:
            return _Reader(b"", path, keeps_arrays=keeps_arrays).header()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Reader(content, path, keeps_arrays=keeps_arrays).header()


class _Reader:
    """A cursor over the header. Every read is checked against the rest of the file first."""

    def __init__(self, content: bytes | mmap.mmap, path: Path, *, keeps_arrays: bool) -> None:
        """Without keeps_arrays arrays are skipped: a vocabulary becomes no strings."""
        self._content = content
        self._path = path
        self._keeps_arrays = keeps_arrays
        self._file_bytes = len(content)
        self._position = 0

    def header(self) -> GgufHeader:
        if self._take(4, "the magic") != _MAGIC:
            raise StartupError(f"{self._path} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
        version = self._number("I", "the version")
        if version not in _VERSIONS:
            raise StartupError(f"{self._path} has GGUF version {version}; supported are 2 and 3, little-endian")
        num_tensors = self._count("tensors", _SMALLEST_TENSOR_BYTES)
        num_keys = self._count("metadata keys", _SMALLEST_KEY_BYTES)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a metadata key", MAX_NAME_BYTES)
            if key in metadata:
                raise StartupError(f"{self._path}: the metadata key {shorten(key)} occurs twice")
            metadata[key] = self._value(key)
        infos: dict[str, tuple[str, tuple[int, ...], int]] = {}
        for _ in range(num_tensors):
            name = self._string("a tensor's name", MAX_NAME_BYTES)
            if name in infos:
                raise StartupError(f"{self._path}: the tensor {shorten(name)} occurs twice")
            infos[name] = self._tensor_info(name)
        return GgufHeader(self._path, metadata, self._place(infos, metadata))

    def _tensor_info(self, name: str) -> tuple[str, tuple[int, ...], int]:
        """Type, shape and offset."""
        where = f"tensor {shorten(name)}"
        num_dims = self._number("I", where)
        if not 1 <= num_dims <= _MAX_DIMENSIONS:
            raise StartupError(
                f"{self._path}: {where} has {num_dims} dimensions; from 1 to {_MAX_DIMENSIONS} are possible"
            )
        sizes = [self._number("Q", where) for _ in range(num_dims)]
        product = 1
        for size in sizes:
            product *= size
            if not 0 < product <= _MAX_SIZE:
                raise StartupError(
                    f"{self._path}: {where} has dimensions {sizes}; their product must be from 1 to 2^48"
                )
        number = self._number("I", where)
        type_name = TYPE_NAMES.get(number, f"number {number}")
        if type_name not in SUPPORTED_TYPES:
            raise StartupError(
                f"{self._path}: {where} has type {type_name}; supported are {', '.join(SUPPORTED_TYPES)}"
            )
        return type_name, tuple(reversed(sizes)), self._number("Q", where)

    def _place(
        self, infos: dict[str, tuple[str, tuple[int, ...], int]], metadata: dict[str, Any]
    ) -> dict[str, GgufTensor]:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16 or alignment & (alignment - 1):
            raise StartupError(f"{self._path}: general.alignment is {shorten(alignment)}; it must be a power of two")
        data_start = -(-self._position // alignment) * alignment
        tensors = {}
        for name, (type_name, shape, offset) in infos.items():
            where = f"{self._path}: tensor {shorten(name)}"
            if offset % alignment:
                raise StartupError(f"{where} has offset {offset}, not a multiple of the alignment, {alignment}")
            stored = _stored(type_name, shape, data_start + offset, where)
            if stored.first_byte + stored.num_bytes > self._file_bytes:
                raise StartupError(
                    f"{where} ends at byte {stored.first_byte + stored.num_bytes}; the file has {self._file_bytes}"
                )
            tensors[name] = GgufTensor(type_name, shape, stored)
        check_apart({name: tensor.stored for name, tensor in tensors.items()}, self._path)
        return tensors

    def _value(self, key: str) -> Any:
        kind = self._number("I", key)
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            return self._number(self._scalar_code(kind, key), key)
        item_kind = self._number("I", key)
        if item_kind == _STRING:
            return self._strings(key, self._array_length(key, _LENGTH.size))
        code = self._scalar_code(item_kind, key)
        item_bytes = struct.calcsize(f"<{code}")
        count = self._array_length(key, item_bytes)
        content = self._take(count * item_bytes, key)
        return list(struct.unpack(f"<{count}{code}", content)) if self._keeps_arrays else []

    def _strings(self, key: str, count: int) -> list[str]:
        # Arrays have hundreds of thousands of strings, and a call for each would take most of the time of a start.
        content, end, unpack, found = self._content, self._position + self._left(), _LENGTH.unpack_from, []
        for _ in range(count):
            start = self._position + _LENGTH.size
            if start > end or (stop := start + unpack(content, self._position)[0]) > end:
                self._string(key)  # raises
            if self._keeps_arrays:
                found.append(content[start:stop].decode("utf-8", "replace"))
            self._position = stop
        return found

    def _scalar_code(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise StartupError(
                f"{self._path}: {shorten(key)} has a value of type {kind}; it must be a scalar or a string"
            )
        return _SCALARS[kind]

    def _array_length(self, key: str, item_bytes: int) -> int:
        count: int = self._number("Q", key)
        left = self._left()
        if count > MAX_ARRAY_ITEMS or count * item_bytes > left:
            raise StartupError(
                f"{self._path}: {shorten(key)} is an array of {count} items; at most {MAX_ARRAY_ITEMS} in "
                f"{left} bytes are possible"
            )
        return count

    def _count(self, what: str, smallest_bytes: int) -> int:
        count: int = self._number("Q", f"the number of {what}")
        most = self._left() // smallest_bytes
        if count > most:
            raise StartupError(f"{self._path} has {count} {what}; the file has room for {most}")
        return count

    def _left(self) -> int:
        """Bytes of the file that may belong to the header."""
        return min(self._file_bytes, MAX_HEADER_BYTES) - self._position

    def _string(self, what: str, most: int = MAX_HEADER_BYTES) -> str:
        num_bytes = self._number("Q", what)
        if num_bytes > most:
            raise StartupError(f"{self._path}: {shorten(what)} has {num_bytes} bytes; at most {most} are possible")
        # Not all tokens of a vocabulary are whole characters.
        return self._take(num_bytes, what).decode("utf-8", "replace")

    def _number(self, code: str, what: str) -> Any:
        (value,) = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}"), what))
        return value

    def _take(self, num_bytes: int, what: str) -> bytes:
        if num_bytes > self._left():
            raise StartupError(
                f"{self._path} is truncated or damaged: {shorten(what)} needs {num_bytes} bytes at byte "
                f"{self._position}, and {max(0, self._left())} are left"
            )
        self._position += num_bytes
        return self._content[self._position - num_bytes : self._position]


def _stored(type_name: str, shape: tuple[int, ...], first_byte: int, where: str) -> StoredTensor:
    num_rows = 1
    for size in shape[:-1]:
        num_rows *= size
    if type_name in FLOAT_DTYPES:
        return StoredTensor(type_name, shape, first_byte, num_rows * shape[-1] * FLOAT_DTYPES[type_name].itemsize)
    blocks = BLOCK_TYPES[type_name]
    if shape[-1] % blocks.values:
        raise StartupError(
            f"{where} of type {type_name} has rows of {shape[-1]} numbers, not a multiple of {blocks.values}"
        )
    row_bytes = shape[-1] // blocks.values * blocks.num_bytes
    return StoredTensor("U8", (*shape[:-1], row_bytes), first_byte, num_rows * row_bytes)
