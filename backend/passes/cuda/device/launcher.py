"""Describes a CUDA kernel to Python, and the interface that launches it: CuPy on a GPU, an emulator in tests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

Argument: TypeAlias = "Tensor | TensorMap | np.int32 | np.int64 | np.float32"
"""A tensor passes the address of its first element; a scalar's numpy type is the parameter's C type."""

KERNELS_DIR = Path(__file__).parent.parent / "kernels"
ACT_MACRO = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Values of the macro ACT, by the dtype of activations."""
Grid: TypeAlias = tuple[int, int, int]


BOX_COLUMNS = 64
"""Columns of a box: 128 bytes, which are swizzled."""


@lru_cache(1 << 12)
def int32(value: int) -> np.int32:
    """An argument of a launch. Most occur in every layer and step; making the object takes longer than finding it."""
    return np.int32(value)


class KernelFailed(Exception):
    """A kernel does not compile, load or launch. The message names it, its macros and the grid."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One instantiation of one kernel: everything that is fixed at compile time.

    source is a file below KERNELS_DIR; entry is the `extern "C"` name of a __global__ function in it. macros are passed
    to the compiler as -DNAME=VALUE and select dtypes, head sizes and the like.
    """

    source: str
    entry: str
    macros: tuple[tuple[str, int], ...]
    num_threads: int
    """Threads per block; blocks are one-dimensional."""
    shared_bytes: int = 0
    """Dynamic shared memory per block."""
    is_dependent: bool = False
    """A launch may begin before the kernels before it have ended; see `wait_for_earlier_kernels` of common/ptx.cuh."""
    carveout_percent: int = 100
    """The share of a multiprocessor's memory that is shared memory, not L1, while the kernel runs; -1 is
    the driver's choice. For kernels without dynamic shared memory the driver always chooses."""
    needs_wgmma: bool = False
    """Compiles for sm_90a only."""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        identity = self.source, self.entry, self.macros, self.num_threads, self.shared_bytes
        object.__setattr__(self, "_hash", hash(identity))

    def __hash__(self) -> int:
        """Computed once: every launch looks its kernel up."""
        return self._hash

    def __str__(self) -> str:
        macros = " ".join(f"{name}={value}" for name, value in self.macros)
        return f"{self.entry}[{macros}]" if macros else self.entry


@dataclass(frozen=True, slots=True, eq=False)
class TensorMap:
    """An argument of type TensorMap (kernels/common/hopper.cuh): a matrix of 16-bit numbers, and the boxes [box_rows,
    BOX_COLUMNS] in which a kernel copies it to shared memory."""

    tensor: Tensor
    """Contiguous; its bytes are the rows of the matrix."""
    columns: int
    box_rows: int
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", self.tensor.nbytes // (2 * self.columns))


def group_by_module(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """Group kernels of one source with the same macros; the compiler makes one module of each group."""
    groups: dict[tuple[str, tuple[tuple[str, int], ...]], list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.source, kernel.macros), []).append(kernel)
    return list(groups.values())


class Launcher(Protocol):
    """Runs kernels in order on one stream of one device."""

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        """Compile and load the kernels, so that `launch` does neither and can be captured in a graph.

        Raises KernelFailed.
        """

    def launch(self, kernel: Kernel, grid: Grid, *arguments: Argument) -> None:
        """Launch the kernel without waiting for it. An empty grid launches nothing. Raises KernelFailed."""
