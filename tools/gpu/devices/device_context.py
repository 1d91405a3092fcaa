"""The device, clock and memory counter that items measure with; tests pass an emulated device instead."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from penstock.backend.passes.cuda.device.cuda_device import CudaDevice
from penstock.backend.passes.cuda.device.device import Device
from penstock.backend.passes.cuda.device.kernel_choices import CONSTANTS, KernelChoices, adopted_choices
from penstock.tools.gpu.devices.timing import Clock, GpuClock


class MemoryCounter(Protocol):
    """The device's memory use in bytes."""

    def reset_peak(self) -> None:
        """Free torch's unused memory, and count the peak from now on."""

    def peak_bytes(self) -> int:
        """Peak memory of torch's tensors since `reset_peak`."""

    def free_bytes(self) -> int:
        """Free memory of the whole device, all processes considered."""


class GpuMemoryCounter:
    def reset_peak(self) -> None:
        gc.collect()  # models in cycles of references
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated()

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info()[0]


@dataclass(frozen=True)
class DeviceContext:
    device: Device
    clock: Clock
    memory: MemoryCounter
    make_device: Callable[[], Device]
    """Another `Device` on the same GPU, with a stream of its own, for the calling thread."""
    choices: KernelChoices = CONSTANTS
    """The kernels' settings that are measured."""

    @property
    def torch_device(self) -> torch.device:
        return self.device.torch_device


@cache
def open_device_context() -> DeviceContext:
    """The context on the first GPU, for one thread of the process, with the settings adopted for its model."""
    return DeviceContext(
        CudaDevice(0), GpuClock(), GpuMemoryCounter(), lambda: CudaDevice(0), adopted_choices("cuda:0")[0]
    )
