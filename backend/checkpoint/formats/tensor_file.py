"""A file of tensors at known places: converts them through a moving window, or maps one.

Mapping a whole file would count a tensor's memory twice while it is copied; an embedding is often a quarter of a model.
Here at most WINDOW_BYTES are mapped while a tensor is copied, at the same speed.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from penstock.backend.checkpoint.files.json_file import LFS_MARK, refuse_lfs_pointer
from penstock.backend.dtypes import Dtype
from penstock.backend.errors import StartupError
from penstock.backend.lazy_torch import Tensor, torch

WINDOW_BYTES = 8 << 20

FLOAT_DTYPES = {"F32": Dtype.FP32, "F16": Dtype.FP16, "BF16": Dtype.BF16}
"""By the names of safetensors, as below."""
READABLE_DTYPES = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "U32": "uint32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""Their names in torch."""
ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E8M0": 1, "F8_E5M2": 1,
}  # fmt: skip


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

    def item(self, index: int) -> StoredTensor:
        """One of the tensors that are stacked in this one."""
        return replace(self.rows(index, 1), shape=self.shape[1:])


class TensorFile:
    """An open file. All tensors are within it. The caller closes it."""

    def __init__(self, path: Path, file: BinaryIO, tensors: dict[str, StoredTensor]) -> None:
        """Owns file."""
        self.path = path
        self.tensors = tensors
        self._file = file

    def copy(self, tensor: StoredTensor, target: Tensor, advance: Callable[[int], None]) -> None:
        """Copy a tensor of floats or bytes into target (contiguous, as many elements), converting to its dtype.

        Calls advance with the number of stored bytes after each window.
        """
        source_dtype = _in_torch(tensor)
        item_bytes = ITEM_BYTES[tensor.dtype]
        flat = target.view(-1)
        window_items = WINDOW_BYTES // item_bytes
        for start in range(0, flat.numel(), window_items):
            count = min(window_items, flat.numel() - start)
            window, lead = self._map(tensor.first_byte + start * item_bytes, count * item_bytes)
            with window:
                flat[start : start + count].copy_(
                    torch.frombuffer(window, dtype=source_dtype, count=count, offset=lead)
                )
            advance(count * item_bytes)

    def read(self, tensor: StoredTensor, advance: Callable[[int], None]) -> Tensor:
        """The tensor in its stored dtype and shape. It is the file's own pages until something writes to it, so it
        costs no copy; its memory is free when the tensor is."""
        advance(tensor.num_bytes)
        count = math.prod(tensor.shape)
        if not count:
            return torch.empty(tensor.shape, dtype=_in_torch(tensor))
        mapping, lead = self._map(tensor.first_byte, tensor.num_bytes)
        return torch.frombuffer(mapping, dtype=_in_torch(tensor), count=count, offset=lead).view(tensor.shape)

    def _map(self, first_byte: int, num_bytes: int) -> tuple[mmap.mmap, int]:
        """Map bytes of the file, and return where they begin in the mapping."""
        lead = first_byte % mmap.ALLOCATIONGRANULARITY
        # A private copy-on-write mapping: torch wants a writable buffer.
        mapping = mmap.mmap(self._file.fileno(), lead + num_bytes, access=mmap.ACCESS_COPY, offset=first_byte - lead)
        mapping.madvise(mmap.MADV_WILLNEED)
        return mapping, lead

    def close(self) -> None:
        self._file.close()


def _in_torch(tensor: StoredTensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, READABLE_DTYPES[tensor.dtype])
    return dtype


def open_file(path: Path) -> BinaryIO:
    """Open a file of tensors. Raises StartupError, also for a git-lfs pointer."""
    try:
        with path.open("rb") as file:
            beginning = file.read(len(LFS_MARK))
        refuse_lfs_pointer(beginning, path)
        return path.open("rb")
    except OSError as error:
        raise StartupError(f"{path} cannot be opened: {error.strerror}") from None


def check_apart(tensors: dict[str, StoredTensor], path: Path) -> None:
    """Raises StartupError if two tensors share bytes."""
    end, before = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].first_byte, item[1].num_bytes)):
        if tensor.num_bytes and tensor.first_byte < end:
            raise StartupError(
                f"{path}: tensor {name} begins at byte {tensor.first_byte}, within {before}, which ends at {end}"
            )
        end, before = max(end, tensor.first_byte + tensor.num_bytes), name
