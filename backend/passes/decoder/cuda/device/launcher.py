"""What a CUDA kernel is to the code that uses it, and who runs it: a GPU through CuPy, or tests on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    Argument: TypeAlias = Tensor | np.int32 | np.int64 | np.float32
    """A tensor stands for the address of its first element; a scalar's numpy type is the parameter's C type."""

KERNELS_DIR = Path(__file__).parent.parent / "kernels"
ACT_MACRO = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Values of the macro ACT, by the dtype of activations."""
Grid: TypeAlias = tuple[int, int, int]


class KernelFailed(Exception):
    """A kernel that does not compile, load or launch; the message names it, its macros and the shape."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One instantiation of one kernel: all that is fixed when it is compiled.

    source is a file in KERNELS_DIR, entry the `extern "C"` name of a __global__ function in it. macros are handed to
    the compiler as -DNAME=VALUE, and choose among dtypes, head sizes and the like.
    """

    source: str
    entry: str
    macros: tuple[tuple[str, int], ...]
    num_threads: int
    """Of a block, which is one-dimensional."""
    shared_bytes: int = 0
    """Dynamic shared memory of a block."""

    def __str__(self) -> str:
        macros = " ".join(f"{name}={value}" for name, value in self.macros)
        return f"{self.entry}[{macros}]" if macros else self.entry


def group_by_module(kernels: Iterable[Kernel]) -> list[list[Kernel]]:
    """Groups of one source with the same macros: a compiler makes one module of each."""
    groups: dict[tuple[str, tuple[tuple[str, int], ...]], list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.source, kernel.macros), []).append(kernel)
    return list(groups.values())


class Launcher(Protocol):
    """Runs kernels in order on one stream of one device."""

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        """Compiles and loads: after it, `launch` does neither, and so may be captured in a graph.

        Raises KernelFailed.
        """
        ...

    def launch(self, kernel: Kernel, grid: Grid, *arguments: Argument) -> None:
        """Returns before the kernel has run. An empty grid is no launch. Raises KernelFailed."""
        ...
