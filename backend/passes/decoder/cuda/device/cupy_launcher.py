"""`Launcher` on a GPU: CuPy loads compiled kernels and launches them in torch's current stream.

Only this module imports cupy, and only when a launcher is created. It supports CuPy 13 and 14.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from penstock.backend.checkpoint.progress import GPU_KERNELS, make_progress
from penstock.backend.passes.decoder.cuda.device import nvrtc
from penstock.backend.passes.decoder.cuda.device.cubin_cache import CubinCache
from penstock.backend.passes.decoder.cuda.device.driver_launch import (
    MIN_COMPUTE_CAPABILITY,
    DriverLauncher,
    LaunchRefused,
)
from penstock.backend.passes.decoder.cuda.device.launcher import KernelFailed, TensorMap, group_by_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from penstock.backend.passes.decoder.cuda.device.launcher import Argument, Grid, Kernel


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A kernel's resources as the driver reports them."""

    registers: int
    """Registers per thread."""
    local_bytes: int
    """Local memory per thread, which holds spilled registers."""


class Stream:
    """The part of a stream that a launch uses. CuPy 13 and 14 use different classes, and 14.0 destroys the stream that
    it wraps."""

    __slots__ = ("ptr",)

    def __init__(self, address: int) -> None:
        self.ptr = address


class _Launch(NamedTuple):
    """Formatted only when a message needs it."""

    kernel: Kernel
    grid: Grid

    def __str__(self) -> str:
        return f"{self.kernel} {self.grid}"


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
        self._functions: dict[Kernel, Any] = {}
        self._driver: DriverLauncher | None = None
        """None until the first kernel that needs it is prepared, and on GPUs before MIN_COMPUTE_CAPABILITY."""
        self.compute_capability = (int(capability[:-1]), int(capability[-1]))
        self.cubins = CubinCache(nvrtc.architecture(self.compute_capability))
        self.resources: dict[Kernel, LoadedKernel] = {}
        """What each loaded kernel uses."""
        self.last_launch: object = "none"
        """str() of it names the last kernel and its grid."""

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        missing = [kernel for kernel in dict.fromkeys(kernels) if kernel not in self._functions]
        if not missing:
            return
        with ThreadPoolExecutor(os.cpu_count()) as pool, closing(make_progress(len(missing), GPU_KERNELS)) as progress:
            for functions in pool.map(self._load, group_by_module(missing)):
                self._functions |= functions
                progress.advance(len(functions))
        if self._driver is None and any(kernel.is_dependent or kernel.needs_wgmma for kernel in missing):
            self._driver = self._open_driver()

    def launch(self, kernel: Kernel, grid: Grid, *arguments: Argument) -> None:
        if 0 in grid:
            return
        function = self._functions.get(kernel)
        if function is None:
            raise KernelFailed(f"{kernel} was launched before it was prepared; this is a bug")
        self.last_launch = _Launch(kernel, grid)
        stream = Stream(torch.cuda.current_stream(self._device_index).cuda_stream)
        try:
            self._start(kernel, function, grid, arguments, stream, Tensor.data_ptr)
        except (*self._faults, LaunchRefused) as error:
            raise KernelFailed(f"{kernel} cannot be launched with grid {grid}: {error}") from error

    def _start(
        self,
        kernel: Kernel,
        function: Any,
        grid: Grid,
        arguments: tuple[Argument, ...],
        stream: Any,
        address_of: Callable[[Tensor], int],
    ) -> None:
        """Launch through CuPy, or through the driver where CuPy cannot. Raises one of _faults, or LaunchRefused."""
        driver = self._driver if kernel.is_dependent or kernel.needs_wgmma else None
        values: list[object] = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                values.append(address_of(argument))
            elif isinstance(argument, TensorMap):
                if driver is None:
                    raise LaunchRefused("only compute capability 9.0 has tensor maps")
                values.append(driver.encode(argument, address_of(argument.tensor)))
            else:
                values.append(argument)
        num_threads, shared_bytes = kernel.num_threads, kernel.shared_bytes
        if driver is None:
            function(grid, (num_threads,), tuple(values), shared_bytes, stream)
        else:
            driver.launch(
                function.ptr, grid, num_threads, shared_bytes, stream.ptr, tuple(values),
                is_dependent=kernel.is_dependent,
            )  # fmt: skip

    def _open_driver(self) -> DriverLauncher | None:
        if torch.cuda.get_device_capability(self._device_index) < MIN_COMPUTE_CAPABILITY:
            return None
        try:
            return DriverLauncher()
        except LaunchRefused as error:
            raise KernelFailed(str(error)) from error

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
