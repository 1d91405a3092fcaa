"""The fake device of `shm`, for which the emulator's memory (memory of this process) is device memory too."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from penstock.shm.buffers.device_api import DeviceError
from tests.backend.passes.cuda.deferred_device import DeferredDevice
from tests.shm.buffers.fake_device import FakeDevice

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.backend.passes.cuda.emulated_device import EmulatedDevice


class EmulatorSharedDevice(FakeDevice):
    """Its only stream is that of the emulated device. Without an emulated device, work is done at once."""

    def __init__(self, directory: Path, gpu: EmulatedDevice | None = None) -> None:
        super().__init__(directory)
        self.gpu = gpu

    def copy(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        self._put(stream, lambda: self._copy_now(destination, source, num_bytes))

    def copy_from_host(self, destination: int, address: int, num_bytes: int, stream: int) -> None:
        self._check_registered(address, num_bytes)

        def copy() -> None:
            self._check_registered(address, num_bytes)
            ctypes.memmove(destination, address, num_bytes)

        self._put(stream, copy)

    def synchronize(self, event: int) -> None:
        self._finish(f"synchronize({event})")
        super().synchronize(event)

    def has_passed(self, event: int) -> bool:
        self._check_fault()
        return super().has_passed(event)

    def free(self, pointer: int) -> None:
        self._finish(f"free({pointer:#x})")
        super().free(pointer)

    def _finish(self, doing: str) -> None:
        """Wait until the emulated device has done all its work."""
        if self.gpu is not None:
            try:
                self.gpu.synchronize()
            except RuntimeError as fault:
                raise DeviceError(f"{doing}: {fault}") from fault

    def _copy_now(self, destination: int, source: int, num_bytes: int) -> None:
        try:
            data = self.read(source, num_bytes)
        except DeviceError:
            self.poke(destination, ctypes.string_at(source, num_bytes))
        else:
            ctypes.memmove(destination, data, num_bytes)

    def _put(self, stream: int, work: Callable[[], None]) -> None:
        assert stream == 0, "the emulator has only stream 0"
        self._check_fault()
        if isinstance(self.gpu, DeferredDevice):
            self.gpu.queue.append(work)
        else:
            work()

    def _check_fault(self) -> None:
        if self.gpu is not None and self.gpu.fault is not None:
            raise DeviceError(str(self.gpu.fault))
