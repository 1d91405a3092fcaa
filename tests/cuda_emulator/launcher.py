"""A Launcher that runs kernels on the CPU, on torch tensors in host memory."""

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

from penstock.backend.passes.cuda.device.launcher import (
    BOX_COLUMNS,
    KERNELS_DIR,
    Grid,
    Kernel,
    KernelFailed,
    TensorMap,
)
from tests.cuda_emulator.build import build_kernels, build_runtime, source_lines
from tests.tallies import note_launch

if TYPE_CHECKING:
    from penstock.backend.passes.cuda.device.launcher import Argument

Mode = Literal["fast", "device", "check"]
Order = Literal["forward", "reverse", "random"]
Build = tuple[str, tuple[tuple[str, int], ...]]
"""A source file and its macros, from which one library is built."""

_ORDERS = {"forward": 0, "reverse": 1, "random": 2}
_POINTER, _FLOAT, _INTEGER, _OTHER = 0, 1, 2, 3
_SITE = re.compile(r"@([0-9a-f]+)@")
_DIRECTORY = re.compile(r"/\S*/(?=\w+\.cuh?:)")
_RUNNING = threading.Lock()
"""Held during a launch, because the runtime has one state per process."""


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


class _TensorMap(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("rows", ctypes.c_longlong),
        ("columns", ctypes.c_longlong),
        ("row_bytes", ctypes.c_longlong),
        ("box_rows", ctypes.c_int),
        ("box_columns", ctypes.c_int),
        ("rest", ctypes.c_char * 88),
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
        ("is_dependent", ctypes.c_int),
    )


class EmulatedLauncher:
    """Runs each kernel before `launch` returns. The package's docstring says what each mode checks.

    order is the sequence in which threads and blocks run; results must not depend on it. seed seeds the random order,
    which differs between launches. Tensors are on the CPU; a kernel may access an argument's bytes from its first
    element to its last, and no others. Raises KernelFailed with what the emulator found.
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
        described = _Launch(
            grid=(ctypes.c_uint * 3)(*grid),
            num_threads=kernel.num_threads,
            shared_bytes=kernel.shared_bytes,
            check=self._mode == "check",
            order=self._order,
            seed=self._seed + self.num_launches,
            is_dependent=kernel.is_dependent,
        )
        error = library.run(entry, described, arguments)
        if error is not None:
            raise KernelFailed(f"{kernel}, grid {grid} of {kernel.num_threads} threads: {error}")
        if self._kernels_dir == KERNELS_DIR and not kernel.source.startswith("/"):
            note_launch(self._mode, str(kernel))

    def _find(self, kernel: Kernel) -> tuple[_Library, int]:
        self.prepare([kernel])
        library = self._libraries[_build_of(kernel)]
        self._entries[kernel] = library, library.entry(kernel)
        return self._entries[kernel]

    def _load(self, build: Build) -> _Library:
        source, macros = build
        return _library(build_kernels(self._kernels_dir, source, macros, self._mode))


class _Library:
    """All kernels of one source and set of macros."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loaded = ctypes.CDLL(str(path))

    def entry(self, kernel: Kernel) -> int:
        """Return the address of the library's description of a kernel."""
        try:
            return ctypes.addressof(ctypes.c_char.in_dll(self._loaded, f"cusim_kernel_{kernel.entry}"))
        except ValueError:
            raise KernelFailed(f"{kernel}: {kernel.source} has no such kernel") from None

    def run(self, entry: int, launch: _Launch, arguments: tuple[Argument, ...]) -> str | None:
        """Return the error with source lines, or None."""
        values = [_value_of(argument) for argument in arguments]
        described = (_Argument * max(1, len(arguments)))(*map(_describe, arguments, values))
        launch.num_arguments, launch.arguments = len(arguments), described
        runtime = _runtime()
        with _RUNNING:
            if runtime.cusim_launch(entry, ctypes.byref(launch)):
                return None
            error = runtime.cusim_error().decode()
        sites = list(dict.fromkeys(_SITE.findall(error)))
        lines = dict(zip(sites, source_lines(self._path, sites), strict=True))
        return _DIRECTORY.sub("", _SITE.sub(lambda match: lines[match[1]], error))


@cache
def _library(path: Path) -> _Library:
    return _Library(path)


def _build_of(kernel: Kernel) -> Build:
    return kernel.source, kernel.macros


@cache
def _runtime() -> ctypes.CDLL:
    library = ctypes.CDLL(str(build_runtime()))
    library.cusim_error.restype = ctypes.c_char_p
    library.cusim_launch.restype = ctypes.c_bool
    library.cusim_launch.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Launch))
    return library


_Value = _TensorMap | ctypes.c_void_p | ctypes.c_int32 | ctypes.c_int64 | ctypes.c_float


def _value_of(argument: object) -> _Value:
    if isinstance(argument, torch.Tensor):
        if argument.device.type != "cpu":
            raise KernelFailed(f"a tensor is on {argument.device}; the emulator needs tensors on the CPU")
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, TensorMap):
        row_bytes = 2 * argument.columns
        base = argument.tensor.data_ptr()
        return _TensorMap(base, argument.rows, argument.columns, row_bytes, argument.box_rows, BOX_COLUMNS)
    if isinstance(argument, np.float32):
        return ctypes.c_float(float(argument))
    if isinstance(argument, np.int32):
        return ctypes.c_int32(int(argument))
    if isinstance(argument, np.int64):
        return ctypes.c_int64(int(argument))
    raise KernelFailed(f"a kernel takes no argument of type {type(argument).__name__}")


def _describe(argument: Argument, value: _Value) -> _Argument:
    address, num_bytes = ctypes.addressof(value), ctypes.sizeof(value)
    if isinstance(argument, TensorMap):
        tensor = argument.tensor
        return _Argument(address, _OTHER, num_bytes, tensor.data_ptr(), tensor.nbytes, 0, 0)
    if not isinstance(argument, torch.Tensor):
        kind = _FLOAT if isinstance(argument, np.float32) else _INTEGER
        return _Argument(address, kind, num_bytes, None, 0, 0, 0)
    last = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.stride(), strict=True))
    element_bytes = argument.element_size()
    tensor_bytes = (last + 1) * element_bytes if argument.numel() else 0
    dtype_kind = _FLOAT if argument.dtype.is_floating_point else _INTEGER
    return _Argument(address, _POINTER, num_bytes, argument.data_ptr(), tensor_bytes, dtype_kind, element_bytes)
