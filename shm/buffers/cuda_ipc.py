"""Device memory that one process owns and another has open: CUDA IPC, behind `DeviceApi`.

The backend allocates and the client opens; the backend opens nothing that a client names. Each buffer is its own
allocation, because a handle opens a whole allocation. It is a multiple of 2 MiB, because the driver serves several
smaller allocations from one such block. An allocation is exported to one client, once, and freed when that client has
closed it or its process has ended. Each has an event, recorded by the side that used it last.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import TYPE_CHECKING

from penstock.shm.buffers.device_api import UUID_BYTES, DeviceError, DeviceRow

if TYPE_CHECKING:
    from penstock.shm.buffers.device_api import DeviceApi, OpenDevice
    from penstock.shm.messages import BufferGrant

logger = logging.getLogger("penstock.buffers")

BLOCK_BYTES = 2 << 20


class ExportedDeviceMemory:
    """The backend's side: zeroed allocations for one client, from `__init__` to `free`."""

    device_reads = True
    is_awaited = False
    """`free` waits for all of the device's work in any case."""

    def __init__(self, device: DeviceApi, num_buffers: int, num_bytes: int) -> None:
        """num_bytes per buffer, a multiple of BLOCK_BYTES. Raises DeviceError, after freeing what it had."""
        if num_bytes % BLOCK_BYTES:
            raise ValueError(
                f"buffers of {num_bytes} bytes; only multiples of {BLOCK_BYTES} share no block with other allocations"
            )
        self._device = device
        self._pointers: list[int] = []
        self._events: list[int] = []
        with ExitStack() as acquired:
            for _ in range(num_buffers):
                self._pointers.append(device.allocate(num_bytes))
                acquired.callback(device.free, self._pointers[-1])
                self._events.append(device.create_event())
                acquired.callback(device.destroy_event, self._events[-1])
            self.memory_handles = tuple(map(device.export_memory, self._pointers))
            self.event_handles = tuple(map(device.export_event, self._events))
            acquired.pop_all()

    def is_written(self, index: int) -> bool:
        """Whether the client's write is complete; the backend never waits for it. Raises DeviceError."""
        return self._device.has_passed(self._events[index])

    def read(self, index: int, offset_bytes: int, num_bytes: int) -> bytes:
        """A copy of what the client wrote. Raises DeviceError."""
        return self._device.read(self._pointers[index] + offset_bytes, num_bytes)

    def copy(self, index: int, offset_bytes: int, num_bytes: int, destination: DeviceRow) -> None:
        """Enqueue a copy out of the buffer on destination.stream, and the buffer's event after it.

        Raises DeviceError.
        """
        self._device.copy(destination.pointer, self._pointers[index] + offset_bytes, num_bytes, destination.stream)
        self._device.record(self._events[index], destination.stream)

    def write(self, index: int, offset_bytes: int, num_bytes: int, source: memoryview | DeviceRow) -> None:
        """Enqueue a copy into the buffer on source.stream, and the buffer's event after it. Raises DeviceError."""
        if not isinstance(source, DeviceRow):
            raise TypeError("a buffer on the device takes device memory")
        self._device.copy(self._pointers[index] + offset_bytes, source.pointer, num_bytes, source.stream)
        self._device.record(self._events[index], source.stream)

    def free(self) -> None:
        """Call when no client has it open and no copy into it runs: freeing waits for the device."""
        for pointer, event in zip(self._pointers, self._events, strict=True):
            try:
                self._device.destroy_event(event)
                self._device.free(pointer)
            except DeviceError as error:
                # The driver frees it at the latest when this process ends.
                logger.error("cannot free a shared buffer on the GPU: %s; it stays until the backend ends", error)
        self._pointers.clear()
        self._events.clear()


class ImportedDeviceMemory:
    """The client's side. Each allocation is opened once and closed once."""

    def __init__(self, grant: BufferGrant, open_device: OpenDevice) -> None:
        """Raises DeviceError, after closing what it opened, if a handle is invalid or its allocation too small."""
        if not len(grant.memory_handles) == len(grant.event_handles) == grant.num_buffers:
            raise DeviceError(
                f"{len(grant.memory_handles)} memory and {len(grant.event_handles)} event handles for "
                f"{grant.num_buffers} buffers"
            )
        if len(grant.device_uuid) != UUID_BYTES:
            raise DeviceError(f"a device's UUID of {len(grant.device_uuid)} bytes, expected {UUID_BYTES}")
        self.device: DeviceApi = open_device(grant.device_uuid)
        self.pointers: list[int] = []
        self.events: list[int] = []
        self._is_open = [True] * grant.num_buffers
        with ExitStack() as opened:
            for memory_handle, event_handle in zip(grant.memory_handles, grant.event_handles, strict=True):
                pointer, num_bytes = self.device.open_memory(memory_handle)
                opened.callback(self.device.close_memory, pointer)
                if num_bytes < grant.num_bytes:
                    raise DeviceError(f"an allocation of {num_bytes} bytes; the grant says {grant.num_bytes}")
                self.pointers.append(pointer)
                self.events.append(self.device.open_event(event_handle))
                opened.callback(self.device.destroy_event, self.events[-1])
            opened.pop_all()

    @property
    def is_closed(self) -> bool:
        return not any(self._is_open)

    def close(self, index: int) -> None:
        """Close one buffer. Idempotent. Raises DeviceError."""
        if self._is_open[index]:
            self.device.destroy_event(self.events[index])
            self.device.close_memory(self.pointers[index])
            self._is_open[index] = False
