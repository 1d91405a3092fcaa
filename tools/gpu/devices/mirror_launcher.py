"""A `Launcher` on a GPU for CPU tensors: each launch copies them to the GPU and back.

Each tensor's bytes, first element to last, have an allocation of their own, so that a sanitizer sees an access just
beyond them. torch runs nothing on the GPU, so the sanitizer watches our kernels only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.backend.passes.cuda.device import nvrtc
from penstock.backend.passes.cuda.device.cupy_launcher import CupyLauncher
from penstock.backend.passes.cuda.device.driver_launch import LaunchRefused
from penstock.backend.passes.cuda.device.launcher import Argument, Grid, Kernel, KernelFailed, TensorMap

_DEFAULT_STREAM = 0
_TO_DEVICE, _TO_HOST = 1, 2
"""cudaMemcpyKind."""


@dataclass
class _Mirror:
    """A range of host addresses and its allocation on the device."""

    start: int
    end: int
    is_poison: bool
    memory: Any = None

    def pointer(self, address: int) -> int:
        return int(self.memory.ptr) + address - self.start


class MirrorLauncher(CupyLauncher):
    """Launches on the default stream and waits after each launch. Kernels are loaded at their first launch."""

    def __init__(self, device_index: int = 0, *, pooled: bool = True, leaves_poison: bool = False) -> None:
        """Without a pool each tensor is a cudaMalloc.

        leaves_poison: do not write tensors that are all NaN to the device, so that a sanitizer sees reads of them.
        """
        super().__init__(device_index)
        self._leaves_poison = leaves_poison
        if not pooled:
            self._cupy.cuda.set_allocator(None)

    @property
    def shared_bytes_per_sm(self) -> int:
        properties = self._cupy.cuda.runtime.getDeviceProperties(self._device_index)
        return int(properties["sharedMemPerMultiprocessor"])

    @property
    def has_wgmma(self) -> bool:
        return nvrtc.architecture(self.compute_capability) == "sm_90a"

    def launch(self, kernel: Kernel, grid: Grid, *arguments: Argument) -> None:
        if 0 in grid:
            return
        if kernel not in self._kernels:
            self.prepare([kernel])
        self._last = kernel, grid
        runtime = self._cupy.cuda.runtime
        mirrors = make_mirrors(arguments)
        try:
            for mirror in mirrors:
                mirror.memory = self._cupy.cuda.alloc(mirror.end - mirror.start)
                if not (self._leaves_poison and mirror.is_poison):
                    runtime.memcpy(mirror.memory.ptr, mirror.start, mirror.end - mirror.start, _TO_DEVICE)
            self._kernels[kernel].launch(grid, _DEFAULT_STREAM, arguments, lambda tensor: _pointer(tensor, mirrors))
            runtime.deviceSynchronize()
            for mirror in mirrors:
                runtime.memcpy(mirror.start, mirror.memory.ptr, mirror.end - mirror.start, _TO_HOST)
        except (*self._faults, LaunchRefused) as error:
            raise KernelFailed(f"{self.last_launch}: {error}") from error


def make_mirrors(arguments: tuple[Argument, ...]) -> list[_Mirror]:
    """The address ranges of the tensors, overlapping ones merged. Raises KernelFailed for a tensor not on the CPU."""
    ranges = []
    tensors = (argument.tensor if isinstance(argument, TensorMap) else argument for argument in arguments)
    for tensor in (tensor for tensor in tensors if isinstance(tensor, Tensor)):
        if tensor.device.type != "cpu":
            raise KernelFailed(f"a tensor on {tensor.device} cannot be mirrored")
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            is_poison = tensor.is_floating_point() and bool(tensor.isnan().all())
            ranges.append((start, start + (last + 1) * tensor.element_size(), is_poison))
    mirrors: list[_Mirror] = []
    for start, end, is_poison in sorted(ranges):
        if mirrors and start < mirrors[-1].end:
            mirrors[-1].end = max(mirrors[-1].end, end)
            mirrors[-1].is_poison &= is_poison
        else:
            mirrors.append(_Mirror(start, end, is_poison))
    return mirrors


def _pointer(tensor: Tensor, mirrors: list[_Mirror]) -> int:
    """0 for a tensor without elements."""
    address = tensor.data_ptr()
    return next((mirror.pointer(address) for mirror in mirrors if mirror.start <= address < mirror.end), 0)
