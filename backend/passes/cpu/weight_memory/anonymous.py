"""The interface of memory for weights, and the memory that ends with the process."""

from __future__ import annotations

import contextlib
import mmap
from typing import Protocol

import torch
from torch import Tensor

from penstock.backend.passes.cpu.library.native_structs import Linear

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64


class WeightMemory(Protocol):
    """Gives each weight its place, one after the other. It is never freed while a tensor of it exists."""

    is_filled: bool
    """Weights are already there: callers get the same ones in the same order, and write nothing."""

    def give_form_to(self, linear: Linear) -> None:
        """Copy the packing of the linear from filled memory; otherwise change nothing."""

    def place(self, num_bytes: int, linear: Linear | None = None) -> Tensor:
        """Return uint8 [num_bytes], at a multiple of 64 bytes. linear describes how a linear is packed."""

    def used(self) -> list[Tensor]:
        """The used part of each mapping, as uint8."""


class AnonymousMemory:
    """Memory in mappings of huge pages. With 4 KB pages, address translation limits how fast a step reads the weights.
    Single tensors are never freed; each keeps its mapping alive."""

    is_filled = False

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used_bytes = 0
        self._full: list[Tensor] = []

    def give_form_to(self, linear: Linear) -> None:
        """Do nothing: the memory is not filled."""

    def place(self, num_bytes: int, linear: Linear | None = None) -> Tensor:  # noqa: ARG002 - nobody asks for it again
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        if self._chunk is None or self._used_bytes + num_bytes > len(self._chunk):
            self._full = self.used()
            self._chunk = map_memory(max(num_bytes, _CHUNK_BYTES))
            self._used_bytes = 0
        tensor = torch.frombuffer(self._chunk, dtype=torch.uint8, count=num_bytes, offset=self._used_bytes)
        self._used_bytes += aligned(num_bytes)
        return tensor

    def used(self) -> list[Tensor]:
        if self._chunk is None:
            return []
        return [*self._full, torch.frombuffer(self._chunk, dtype=torch.uint8, count=self._used_bytes)]


def aligned(num_bytes: int) -> int:
    """Round up to a multiple of 64."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def map_memory(num_bytes: int) -> mmap.mmap:
    """Map zeroed anonymous memory, in huge pages where the system has them; it becomes resident when written."""
    # Private, because shared anonymous memory, the default of mmap, gets no huge pages.
    return request_huge_pages(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def request_huge_pages(memory: mmap.mmap) -> mmap.mmap:
    """Return the same mapping. Of a file it gets huge pages only where the page cache has them."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
