"""A `Device` without a GPU: tensors on the CPU, kernels on the emulator, graphs as recorded calls.

A graph holds addresses and numbers: memory that is freed or the host's, and what changes after the capture, are errors.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.backend.forward_pass import DeviceLost
from penstock.shm.buffers.cuda_blocks import DeviceBlocks
from penstock.shm.buffers.cuda_driver import DriverDevice
from penstock.shm.buffers.device_api import DeviceError
from tests.backend.passes.cuda.recorded_calls import Call, CapturedCall, RecordedGraph
from tests.cuda_emulator.launcher import EmulatedLauncher
from tests.shm.buffers.stub_driver import stub_library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import Tensor

    from penstock.backend.passes.cuda.device.device import Event
    from penstock.backend.passes.cuda.device.launcher import Argument, Grid, Kernel, Launcher


class RecordingLauncher:
    """Runs kernels at once, or records them while a graph is captured. Like on a GPU, kernels must be prepared."""

    def __init__(self, inner: Launcher) -> None:
        self._inner = inner
        self._prepared: set[Kernel] = set()
        self.recorded: list[Callable[[], object]] | None = None
        self.last_launch = "none"
        self.launched: list[str] = []

    def prepare(self, kernels: Iterable[Kernel]) -> None:
        kernels = list(kernels)
        assert self.recorded is None or self._prepared.issuperset(kernels), "loading a kernel in a captured step"
        self._inner.prepare(kernels)
        self._prepared.update(kernels)

    def launch(self, kernel: Kernel, grid: Grid, *arguments: Argument) -> None:
        assert kernel in self._prepared, f"{kernel} was not prepared"
        self.last_launch = f"{kernel} {grid}"
        self.launched.append(kernel.entry)
        if self.recorded is None:
            self._inner.launch(kernel, grid, *arguments)
        else:
            self.recorded.append(Call(self._inner.launch, (kernel, grid, *arguments)))


class RecordingMode(TorchDispatchMode):
    """Records torch's operations instead of running them, and refuses what a captured step must not do."""

    def __init__(self, recorded: list[Callable[[], object]]) -> None:
        super().__init__()
        self._recorded = recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.is_mutable:
            self._recorded.append(Call(func, args, kwargs))
            values = [*args, *(kwargs.get(argument.name) for argument in schema.arguments[len(args) :])]
            written = [
                value
                for argument, value in zip(schema.arguments, values, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            return written[0] if len(written) == 1 else tuple(written)
        is_view = bool(schema.returns) and all(
            value.alias_info is not None and not value.alias_info.is_write for value in schema.returns
        )
        assert is_view, f"{func} allocates or waits in a captured step"
        return func(*args, **kwargs)


class ImmediateEvent:
    """An event on a device that does all work at once."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device

    def synchronize(self) -> None:
        self._device.synchronize()


@dataclass
class EmulatedHostMemory:
    """Implements `HostMemory`. It starts full of 0xFF, so that a read before a write shows."""

    bytes: Tensor
    is_free: bool = False

    def free(self) -> None:
        assert not self.is_free, "freed twice"
        self.is_free = True


class EmulatedBlocks(DeviceBlocks):
    """Implements `BlockRange`: the driver's stub maps memory of the host."""

    def tensor(self, begin: int, num_bytes: int) -> Tensor:
        memory = (ctypes.c_uint8 * num_bytes).from_address(self.pointer + begin)
        return torch.frombuffer(memory, dtype=torch.uint8)


@dataclass
class EmulatedDevice:
    """Once `fault` is set, every wait for the device raises it, like a poisoned CUDA context. A block of host memory
    larger than `lockable_bytes` cannot be page-locked."""

    mode: str = "fast"
    fault: Exception | None = None
    graphs: list[RecordedGraph] = field(default_factory=list)
    num_events: int = 0
    pinned_tensors: list[Tensor] = field(default_factory=list)
    lockable_bytes: int = 1 << 30
    host_memories: list[EmulatedHostMemory] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.num_sms = 4
        self.stream = 0
        self.shared_bytes_per_sm = 228 << 10
        self.compute_capability = (9, 0)
        self.link_probe_bytes = 1 << 20
        self.launcher = RecordingLauncher(shared_launcher(self.mode))

    @property
    def last_launch(self) -> str:
        return self.launcher.last_launch

    def pinned(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        self.pinned_tensors.append(torch.zeros(num_elements, dtype=dtype))
        return self.pinned_tensors[-1]

    def host_memory(self, num_bytes: int) -> EmulatedHostMemory:
        if num_bytes > self.lockable_bytes:
            raise DeviceError("cuMemHostAlloc: CUDA_ERROR_OUT_OF_MEMORY (2)")
        self.host_memories.append(EmulatedHostMemory(torch.full((num_bytes,), 0xFF, dtype=torch.uint8)))
        return self.host_memories[-1]

    @property
    def uuid(self) -> bytes:
        return DriverDevice(0, stub_library()).uuid

    def block_range(self, max_bytes: int) -> EmulatedBlocks:
        return EmulatedBlocks(DriverDevice(0, stub_library()), max_bytes)

    def record(self, done: Event | None = None) -> ImmediateEvent:
        assert self.launcher.recorded is None, "an event in a captured step"
        self.num_events += 1
        return ImmediateEvent(self)

    def capture(self, work: Callable[[], None]) -> RecordedGraph:
        graph = RecordedGraph(self._capture(work), work)
        self.graphs.append(graph)
        return graph

    @torch.inference_mode()
    def require_same_graphs(self) -> None:
        """Fail if a graph captured now had other addresses or numbers than it has."""
        for graph in self.graphs:
            before, now = ([call.leaves() for call in calls] for calls in (graph.calls, self._capture(graph.work)))
            assert len(before) == len(now), "a captured step has another number of kernels now"
            for old, new in zip(before, now, strict=True):
                assert old == new, f"captured: {old}; now: {new}"

    def _capture(self, work: Callable[[], None]) -> list[CapturedCall]:
        calls: list[Any] = []
        with self._recording(calls), RecordingMode(calls):
            work()
        of_host = [*self.pinned_tensors, *(memory.bytes for memory in self.host_memories)]
        addresses = {tensor.untyped_storage().data_ptr() for tensor in of_host}
        return [call.captured(addresses) for call in calls]

    @contextmanager
    def _recording(self, calls: list[Callable[[], object]]) -> Iterator[None]:
        self.launcher.recorded = calls
        try:
            yield
        finally:
            self.launcher.recorded = None

    def synchronize(self) -> None:
        assert self.launcher.recorded is None, "waiting in a captured step"
        if self.fault is not None:
            raise self.fault

    def trim(self) -> None:
        return

    def check(self, doing: str) -> None:
        try:
            self.synchronize()
        except Exception as fault:
            raise DeviceLost(f"{doing}: {fault}; last launch: {self.launcher.last_launch}") from fault


_launchers: dict[str, Any] = {}


def shared_launcher(mode: str) -> Launcher:
    """Return the one launcher of the mode, shared by all devices, so that kernels are compiled once."""
    if mode not in _launchers:
        _launchers[mode] = EmulatedLauncher(mode=mode)
    launcher: Launcher = _launchers[mode]
    return launcher
