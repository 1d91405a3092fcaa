"""`Launcher` on a GPU: CuPy compiles the kernels, loads them, and puts them into torch's current stream.

cupy is imported here alone, and only when a launcher is made. CuPy 13 and 14 both serve.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from backend.passes.decoder.cuda.launcher import KERNELS_DIR, KernelFailed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from backend.passes.decoder.cuda.launcher import Argument, Grid, Kernel


class CupyLauncher:
    """See `Launcher`. CuPy allocates nothing here and has no stream of its own."""

    def __init__(self, device_index: int) -> None:
        import cupy

        cupy.cuda.Device(device_index).use()
        self._cupy = cupy
        self._device_index = device_index
        cuda = cupy.cuda
        self._faults = (cuda.compiler.CompileException, cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError)
        self._functions: dict[Kernel, Any] = {}
        self._streams: dict[int, Any] = {}
        self.last_launch = "none"
        """The kernel launched last and its grid, for messages."""

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        for kernel in kernels:
            if kernel not in self._functions:
                self._functions[kernel] = self._load(kernel)

    def launch(self, kernel: Kernel, grid: Grid, *arguments: Argument) -> None:
        if 0 in grid:
            return
        function = self._functions.get(kernel)
        if function is None:
            raise KernelFailed(f"{kernel} was launched before it was prepared; this is a bug")
        self.last_launch = f"{kernel} {grid}"
        pointers = tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in arguments)
        try:
            function(grid, (kernel.num_threads,), pointers, kernel.shared_bytes, self._stream())
        except self._faults as error:
            raise KernelFailed(f"{kernel} cannot be launched with grid {grid}: {error}") from error

    def _stream(self) -> Any:
        """torch's current stream as CuPy sees it."""
        stream = torch.cuda.current_stream(self._device_index)
        address = stream.cuda_stream
        found = self._streams.get(address)
        if found is None:
            kind = self._cupy.cuda.Stream
            # ExternalStream is what CuPy 13 has, and deprecated in 14.
            found = (
                kind.from_external(stream)
                if hasattr(kind, "from_external")
                else self._cupy.cuda.ExternalStream(address, self._device_index)
            )
            self._streams[address] = found
        return found

    def _load(self, kernel: Kernel) -> Any:
        options = (
            "--std=c++17",
            f"-I{KERNELS_DIR}",
            # CuPy keeps what it has compiled under a name that does not know of included files.
            f"-DPENSTOCK_SOURCES=0x{sources_digest()}",
            *(f"-D{name}={value}" for name, value in kernel.macros),
        )
        # Included, so that messages name the file, and CuPy need not write it again in whatever encoding.
        code = f'#include "{kernel.source}"\n'
        try:
            raw = self._cupy.RawModule(code=code, options=options, backend="nvrtc").get_function(kernel.entry)
            if kernel.shared_bytes:
                raw.max_dynamic_shared_size_bytes = kernel.shared_bytes
            return raw.kernel
        except self._faults as error:
            raise KernelFailed(f"{kernel} of {kernel.source} cannot be compiled or loaded: {error}") from error


@cache
def sources_digest() -> str:
    """Of all kernel sources, 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(KERNELS_DIR.glob("*.cu*")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
