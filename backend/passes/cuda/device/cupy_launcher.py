"""`Launcher` on a GPU: CuPy loads compiled kernels, and the driver launches them in torch's current stream.

Only this module imports cupy, and only when a launcher is created. It supports CuPy 13 and 14.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.backend.checkpoint.files.progress import GPU_KERNELS, make_progress
from penstock.backend.passes.cuda.device import nvrtc
from penstock.backend.passes.cuda.device.cubin_cache import CubinCache
from penstock.backend.passes.cuda.device.driver_launch import (
    Driver,
    DriverKernel,
    LaunchRefused,
)
from penstock.backend.passes.cuda.device.launcher import Argument, Grid, Kernel, KernelFailed, group_by_module


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel's resources as the driver reports them."""

    registers: int
    """Registers per thread."""
    local_bytes: int
    """Local memory per thread, which holds spilled registers."""


class CupyLauncher:
    """Implements `Launcher`. CuPy allocates no device memory here and has no stream of its own."""

    def __init__(self, device_index: int) -> None:
        """Raises KernelFailed if CuPy cannot be imported or cannot use the device, for example with an old driver."""
        try:
            import cupy

            cupy.cuda.Device(device_index).use()
            capability = cupy.cuda.Device(device_index).compute_capability
        # CuPy's runtime errors are RuntimeErrors. OSError: importing CuPy creates its cache directory.
        except (ImportError, RuntimeError, OSError) as error:
            raise KernelFailed(f"CuPy does not work: {' '.join(str(error).split())}") from error
        self._cupy = cupy
        self._device_index = device_index
        cuda = cupy.cuda
        self._faults = (cuda.compiler.CompileException, cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError)
        self._kernels: dict[Kernel, DriverKernel] = {}
        self._driver: Driver | None = None
        """None until the first kernel is prepared."""
        self._last: tuple[Kernel, Grid] | None = None
        self.compute_capability = (int(capability[:-1]), int(capability[-1]))
        self.cubins = CubinCache(nvrtc.architecture(self.compute_capability))
        self.resources: dict[Kernel, LoadedKernel] = {}
        """What each loaded kernel uses."""

    @property
    def last_launch(self) -> str:
        """The last kernel and its grid."""
        return "none" if self._last is None else "{} {}".format(*self._last)

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        missing = [kernel for kernel in dict.fromkeys(kernels) if kernel not in self._kernels]
        if not missing:
            return
        if self._driver is None:
            try:
                self._driver = Driver()
            except LaunchRefused as error:
                raise KernelFailed(str(error)) from error
        with ThreadPoolExecutor(os.cpu_count()) as pool, closing(make_progress(len(missing), GPU_KERNELS)) as progress:
            for functions in pool.map(self._load, group_by_module(missing)):
                for kernel, function in functions.items():
                    self._kernels[kernel] = DriverKernel(self._driver, function, kernel, self.compute_capability)
                progress.advance(len(functions))

    def launch(self, kernel: Kernel, grid: Grid, *arguments: Argument) -> None:
        if 0 in grid:
            return
        loaded = self._kernels.get(kernel)
        if loaded is None:
            raise KernelFailed(f"{kernel} was launched before it was prepared; this is a bug")
        self._last = kernel, grid
        # torch.cuda.current_stream would make an object of the stream.
        stream = torch._C._cuda_getCurrentRawStream(self._device_index)
        try:
            loaded.launch(grid, stream, arguments, Tensor.data_ptr)
        except LaunchRefused as error:
            raise KernelFailed(f"{kernel} cannot be launched with grid {grid}: {error}") from error

    def _load(self, kernels: list[Kernel]) -> dict[Kernel, Any]:
        """Load kernels of one source with the same macros, as one module. Any thread may call it."""
        try:
            self._cupy.cuda.Device(self._device_index).use()  # of this thread
            with self.cubins.opened(kernels) as path:
                module = self._cupy.RawModule(path=str(path))
                raws = {kernel: _function(module, kernel) for kernel in kernels}
                functions = {kernel: raw.kernel for kernel, raw in raws.items()}
        # RuntimeError and OSError: a cubin cannot be read or written, or is of another architecture.
        except (*self._faults, RuntimeError, OSError) as error:
            named = ", ".join(map(str, kernels))
            raise KernelFailed(f"{named} of {kernels[0].source} cannot be loaded: {error}") from error
        self.resources |= {
            kernel: LoadedKernel(int(raw.num_regs), int(raw.local_size_bytes)) for kernel, raw in raws.items()
        }
        return functions


def _function(module: Any, kernel: Kernel) -> Any:
    raw = module.get_function(kernel.entry)
    if kernel.shared_bytes:
        # Kernels that differ only in shared_bytes are one driver function; its limit must allow the largest of them.
        raw.max_dynamic_shared_size_bytes = max(kernel.shared_bytes, raw.max_dynamic_shared_size_bytes)
        raw.preferred_shared_memory_carveout = kernel.carveout_percent
    return raw
