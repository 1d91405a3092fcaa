"""`Device` on a real GPU: torch.cuda for memory, streams and graphs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import DeviceLost
from penstock.backend.passes.cuda.device.cupy_launcher import CupyLauncher
from penstock.backend.passes.cuda.device.device import Event
from penstock.backend.passes.cuda.device.launcher import KernelFailed
from penstock.shm.buffers.cuda_blocks import DeviceBlocks
from penstock.shm.buffers.cuda_driver import DriverDevice
from penstock.shm.buffers.device_api import DeviceError


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Implements `Event`."""

    event: torch.cuda.Event
    device_index: int

    def synchronize(self) -> None:
        # A new thread uses GPU 0 by default; waiting there would create a context on a GPU that is not ours.
        torch.cuda.set_device(self.device_index)
        self.event.synchronize()


class _HostMemory:
    """Implements `HostMemory`."""

    def __init__(self, driver: DriverDevice, num_bytes: int) -> None:
        self._driver = driver
        self._address = driver.allocate_host(num_bytes)
        self.bytes = torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(self._address), dtype=torch.uint8)

    def free(self) -> None:
        self._driver.free_host(self._address)


@dataclass(frozen=True, slots=True)
class _DeviceBytes:
    """Memory that torch takes over by the CUDA array interface."""

    pointer: int
    num_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        data = (self.pointer, False)
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": data, "strides": None, "version": 3}


class _BlockRange(DeviceBlocks):
    """Implements `BlockRange`."""

    def __init__(self, driver: DriverDevice, torch_device: torch.device, max_bytes: int) -> None:
        super().__init__(driver, max_bytes)
        self._torch_device = torch_device

    def tensor(self, begin: int, num_bytes: int) -> Tensor:
        return torch.as_tensor(_DeviceBytes(self.pointer + begin, num_bytes), device=self._torch_device)


class CudaDevice:
    """Implements `Device`. Belongs to the thread that creates it, and becomes that thread's current stream."""

    def __init__(self, index: int) -> None:
        torch.cuda.set_device(index)
        # Keep the partial sums of split-K matrix products in fp32.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self.torch_device = torch.device("cuda", index)
        # A graph cannot be captured on the default stream.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._stream)
        self.launcher = CupyLauncher(index)
        properties = torch.cuda.get_device_properties(index)
        self.num_sms: int = properties.multi_processor_count
        self.shared_bytes_per_sm: int = properties.shared_memory_per_multiprocessor
        self.compute_capability: tuple[int, int] = (properties.major, properties.minor)
        self.link_probe_bytes = 64 << 20

    @property
    def last_launch(self) -> str:
        return str(self.launcher.last_launch)

    @property
    def stream(self) -> int:
        return int(self._stream.cuda_stream)

    def pinned(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_elements, dtype=dtype, pin_memory=True)

    def host_memory(self, num_bytes: int) -> _HostMemory:
        return _HostMemory(DriverDevice(self.torch_device.index), num_bytes)

    @property
    def uuid(self) -> bytes:
        return DriverDevice(self.torch_device.index).uuid

    def block_range(self, max_bytes: int) -> _BlockRange:
        return _BlockRange(DriverDevice(self.torch_device.index), self.torch_device, max_bytes)

    def record(self, done: Event | None = None) -> _Recorded:
        if not isinstance(done, _Recorded):
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done = _Recorded(event, self.torch_device.index)
        done.event.record(self._stream)
        return done

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # On our own stream, cuBLAS reuses the workspace that it allocated outside the graph. So a capture allocates
        # nothing, and graphs need no common pool: torch refuses a pool that has outlived its graphs.
        # "thread_local" lets other threads use the device during the capture.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph

    def synchronize(self) -> None:
        self._stream.synchronize()

    def trim(self) -> None:
        torch.cuda.empty_cache()

    def check(self, doing: str) -> None:
        try:
            self._stream.synchronize()
        except Exception as fault:  # any error here means that the device no longer works
            raise DeviceLost(
                f"{doing}: {str(fault).strip().splitlines()[0]}; last launch: {self.last_launch}, but an earlier "
                "kernel may have failed: set CUDA_LAUNCH_BLOCKING=1 to find it"
            ) from fault


def uuid_of(name: str) -> bytes:
    """The identity of the GPU of `PassOptions.device`, such as "cuda:0". Raises StartupError."""
    try:
        return DriverDevice(_index_of(name)).uuid
    except DeviceError as error:
        raise StartupError(f"GPU {_index_of(name)} cannot be used: {error}") from error


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.devices: WeakValueDictionary[int, CudaDevice] = WeakValueDictionary()


_of_thread = _OfThread()


def open_gpu(name: str) -> CudaDevice:
    """Open the GPU of `PassOptions.device`, such as "cuda:0". Raises StartupError.

    Passes of one thread share a device: a thread has one current stream.
    """
    index, opened = _index_of(name), _of_thread.devices
    try:
        if (device := opened.get(index)) is None:
            device = opened[index] = CudaDevice(index)
        return device
    except (KernelFailed, RuntimeError) as error:
        raise StartupError(f"GPU {index} cannot be used: {str(error).strip().splitlines()[0]}") from error


def _index_of(name: str) -> int:
    return int(name.partition(":")[2])
