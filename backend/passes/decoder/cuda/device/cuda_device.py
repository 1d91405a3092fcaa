"""`Device` on a real GPU: torch.cuda for memory, streams and graphs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from penstock.backend.forward_pass import DeviceLost
from penstock.backend.passes.decoder.cuda.device.cupy_launcher import CupyLauncher
from penstock.shm.buffers.cuda_driver import DriverDevice

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Recorded:
    """See `Event`."""

    event: torch.cuda.Event
    device_index: int

    def synchronize(self) -> None:
        # A thread that has not said so is on GPU 0, where waiting would make a context in memory that is not ours.
        torch.cuda.set_device(self.device_index)
        self.event.synchronize()


class _HostMemory:
    """See `HostMemory`."""

    def __init__(self, driver: DriverDevice, num_bytes: int) -> None:
        self._driver = driver
        self._address = driver.allocate_host(num_bytes)
        self.bytes = torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(self._address), dtype=torch.uint8)

    def free(self) -> None:
        self._driver.free_host(self._address)


class CudaDevice:
    """See `Device`. Belongs to the thread that makes it, whose current stream it sets."""

    def __init__(self, index: int) -> None:
        torch.cuda.set_device(index)
        # Sums of products that are cut along their length stay in fp32.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self.torch_device = torch.device("cuda", index)
        # Graphs cannot be captured on the default stream.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self._stream)
        self.launcher = CupyLauncher(index)
        properties = torch.cuda.get_device_properties(index)
        self.num_sms: int = properties.multi_processor_count
        self.shared_bytes_per_sm: int = properties.shared_memory_per_multiprocessor

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

    def record(self) -> _Recorded:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _Recorded(event, self.torch_device.index)

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # On our own stream the products find the workspace that they were given outside the graph.
        # So nothing is allocated in it, and graphs need not share a pool: torch refuses one that outlived its graphs.
        # Other threads may go on using the device meanwhile.
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
        except Exception as fault:  # whatever it is, a device that cannot be waited for computes no more
            raise DeviceLost(
                f"{doing}: {str(fault).strip().splitlines()[0]}; given last was {self.last_launch}, and the "
                "fault may be an earlier kernel's: CUDA_LAUNCH_BLOCKING=1 names it"
            ) from fault
