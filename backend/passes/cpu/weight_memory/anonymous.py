"""The interface of memory for weights, and the memory that ends with the process."""

from __future__ import annotations

import contextlib
import mmap
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.backend.passes.cpu.library.native_structs import Linear

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64


class WeightMemory(Protocol):
    """Gives each weight its place, one after the other. It is never freed while an array in it exists."""

    is_filled: bool
    """Weights are already there: callers get the same ones in the same order, and write nothing."""

    def give_form_to(self, linear: Linear) -> None:
        """Copy the packing of the linear from filled memory; otherwise change nothing."""

    def holds_linear(self) -> bool:
        """Whether the memory is filled and the next weight in it is a linear."""

    def place(self, num_bytes: int, linear: Linear | None = None) -> NDArray[np.uint8]:
        """Return uint8 [num_bytes], at a multiple of 64 bytes. linear describes how a linear is packed."""

    def used(self) -> list[NDArray[np.uint8]]:
        """The used part of each mapping, as uint8."""


class UnfilledMemory:
    """The part of a `WeightMemory` in which weights are still to be packed."""

    is_filled = False

    def give_form_to(self, linear: Linear) -> None:
        """Do nothing."""

    def holds_linear(self) -> bool:
        return False


class AnonymousMemory(UnfilledMemory):
    """Memory in mappings of huge pages. With 4 KB pages, address translation limits how fast a step reads the weights.
    Single arrays are never freed; each keeps its mapping alive."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used_bytes = 0
        self._full: list[NDArray[np.uint8]] = []

    def place(self, num_bytes: int, linear: Linear | None = None) -> NDArray[np.uint8]:  # noqa: ARG002 - nobody asks for it again
        if num_bytes == 0:
            return np.empty(0, np.uint8)
        if self._chunk is None or self._used_bytes + num_bytes > len(self._chunk):
            self._full = self.used()
            self._chunk = map_memory(max(num_bytes, _CHUNK_BYTES))
            self._used_bytes = 0
        array = np.frombuffer(self._chunk, np.uint8, num_bytes, self._used_bytes)
        self._used_bytes += aligned(num_bytes)
        return array

    def used(self) -> list[NDArray[np.uint8]]:
        if self._chunk is None:
            return []
        return [*self._full, np.frombuffer(self._chunk, np.uint8, self._used_bytes)]


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
