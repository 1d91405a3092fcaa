"""A Launcher that runs kernels on the CPU, on torch tensors in the host's memory."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from backend.passes.decoder.cuda.launcher import KERNELS_DIR, Grid, Kernel, KernelFailed
from tests.cuda_emulator.build import build_kernels, build_runtime, source_lines

if TYPE_CHECKING:
    from backend.passes.decoder.cuda.launcher import Argument

Mode = Literal["fast", "check"]
Order = Literal["forward", "reverse", "random"]
Build = tuple[str, tuple[tuple[str, int], ...]]
"""A source file and its macros: what one library is made of."""

_ORDERS = {"forward": 0, "reverse": 1, "random": 2}
_POINTER, _FLOAT, _INTEGER = 0, 1, 2
_SITE = re.compile(r"@([0-9a-f]+)@")
_RUNNING = threading.Lock()
"""The runtime has one state for the process."""


class _Argument(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("kind", ctypes.c_int),
        ("bytes", ctypes.c_int),
        ("tensor", ctypes.c_void_p),
        ("tensor_bytes", ctypes.c_size_t),
        ("dtype_kind", ctypes.c_int),
        ("dtype_bytes", ctypes.c_int),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("num_threads", ctypes.c_int),
        ("shared_bytes", ctypes.c_size_t),
        ("num_arguments", ctypes.c_int),
        ("arguments", ctypes.POINTER(_Argument)),
        ("check", ctypes.c_int),
        ("order", ctypes.c_int),
        ("seed", ctypes.c_uint64),
    )


class EmulatedLauncher:
    """Runs each kernel before `launch` returns; see the package for what the modes check.

    order says in which sequence threads and blocks take their turns; results must not depend on it. seed is of the
    random order, another one for each launch. Tensors lie on the CPU; a kernel may touch an argument's bytes from its
    first element to its last, and no others. Raises KernelFailed with what the emulator found.
    """

    def __init__(
        self, mode: Mode = "fast", order: Order = "forward", seed: int = 0, kernels_dir: Path = KERNELS_DIR
    ) -> None:
        self._mode: Mode = mode
        self._order = _ORDERS[order]
        self._seed = seed
        self._kernels_dir = kernels_dir
        self._libraries: dict[Build, _Library] = {}
        self._entries: dict[Kernel, tuple[_Library, int]] = {}
        self.num_launches = 0

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        builds = [build for build in dict.fromkeys(map(_build_of, kernels)) if build not in self._libraries]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self._libraries |= zip(builds, pool.map(self._load, builds), strict=True)

    def launch(self, kernel: Kernel, grid: Grid, *arguments: Argument) -> None:
        if 0 in grid:
            return
        library, entry = self._entries.get(kernel) or self._find(kernel)
        self.num_launches += 1
        error = _run(kernel, grid, arguments, entry, self._mode == "check", self._order, self._seed + self.num_launches)
        if error is not None:
            offsets = list(dict.fromkeys(_SITE.findall(error)))
            lines = dict(zip(offsets, source_lines(library.path, offsets), strict=True))
            found = _SITE.sub(lambda match: lines[match[1]], error)
            raise KernelFailed(f"{kernel}, grid {grid} of {kernel.num_threads} threads: {found}")

    def _find(self, kernel: Kernel) -> tuple[_Library, int]:
        self.prepare([kernel])
        library = self._libraries[_build_of(kernel)]
        self._entries[kernel] = library, library.entry(kernel)
        return self._entries[kernel]

    def _load(self, build: Build) -> _Library:
        source, macros = build
        return _Library(build_kernels(self._kernels_dir / source, macros, self._mode))


class _Library:
    """All kernels of one source and set of macros."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._loaded = ctypes.CDLL(str(path))

    def entry(self, kernel: Kernel) -> int:
        """The address of what the library says of a kernel."""
        try:
            return ctypes.addressof(ctypes.c_char.in_dll(self._loaded, f"cusim_kernel_{kernel.entry}"))
        except ValueError:
            raise KernelFailed(f"{kernel}: {kernel.source} has no such kernel") from None


def _build_of(kernel: Kernel) -> Build:
    return kernel.source, kernel.macros


@cache
def _runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_runtime()))
    library.cusim_error.restype = ctypes.c_char_p
    library.cusim_launch.restype = ctypes.c_bool
    library.cusim_launch.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Launch))
    return library


def _run(
    kernel: Kernel, grid: Grid, arguments: tuple[Argument, ...], entry: int, check: bool, order: int, seed: int
) -> str | None:
    """Returns what went wrong."""
    values = [_value_of(argument) for argument in arguments]
    described = (_Argument * max(1, len(arguments)))(*map(_describe, arguments, values))
    launch = _Launch(
        (ctypes.c_uint * 3)(*grid), kernel.num_threads, kernel.shared_bytes, len(arguments), described, check, order, seed
    )
    runtime = _runtime()
    with _RUNNING:
        if runtime.cusim_launch(entry, ctypes.byref(launch)):
            return None
        return str(runtime.cusim_error().decode())


_Value = ctypes.c_void_p | ctypes.c_int32 | ctypes.c_int64 | ctypes.c_float


def _value_of(argument: Argument) -> _Value:
    match argument:
        case torch.Tensor():
            if argument.device.type != "cpu":
                raise KernelFailed(f"the emulator's tensors lie on the CPU, not on {argument.device}")
            return ctypes.c_void_p(argument.data_ptr())
        case np.int32():
            return ctypes.c_int32(int(argument))
        case np.int64():
            return ctypes.c_int64(int(argument))
        case np.float32():
            return ctypes.c_float(float(argument))
    raise KernelFailed(f"no argument of a kernel: {type(argument).__name__}")


def _describe(argument: Argument, value: _Value) -> _Argument:
    address, num_bytes = ctypes.addressof(value), ctypes.sizeof(value)
    if not isinstance(argument, torch.Tensor):
        kind = _FLOAT if isinstance(argument, np.float32) else _INTEGER
        return _Argument(address, kind, num_bytes, None, 0, 0, 0)
    last = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.stride(), strict=True))
    element_bytes = argument.element_size()
    tensor_bytes = (last + 1) * element_bytes if argument.numel() else 0
    dtype_kind = _FLOAT if argument.dtype.is_floating_point else _INTEGER
    return _Argument(address, _POINTER, num_bytes, argument.data_ptr(), tensor_bytes, dtype_kind, element_bytes)
