"""The GPU operations that shared buffers need. `cuda_driver` implements them; tests use a fake device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

HANDLE_BYTES = 64
"""Size of a handle of memory or of an event."""
UUID_BYTES = 16


class DeviceError(Exception):
    """The device refused a call or cannot do it. The message is one line that names the call."""


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """Device memory to read once the work enqueued on stream is done, or to write after it."""

    pointer: int
    stream: int


class DeviceApi(Protocol):
    """One GPU as one process sees it.

    Pointers, events and streams are the driver's, as integers; stream 0 is the default stream. Any thread may call, and
    every call may raise DeviceError.
    """

    @property
    def uuid(self) -> bytes:
        """The GPU's identity, UUID_BYTES long; ordinals differ between processes."""

    def allocate(self, num_bytes: int) -> int:
        """An allocation of zeroes that is not part of another. Do not call it within a step: the device waits."""

    def free(self, pointer: int) -> None:
        """No other process may have the allocation open."""

    def export_memory(self, pointer: int) -> bytes:
        """A handle that opens the whole allocation."""

    def open_memory(self, handle: bytes) -> tuple[int, int]:
        """(pointer, bytes) of another process's allocation, until `close_memory`."""

    def close_memory(self, pointer: int) -> None: ...

    def create_event(self) -> int:
        """An event that other processes can open. It counts as passed until it is recorded."""

    def destroy_event(self, event: int) -> None:
        """Destroy a created event, or close an opened one."""

    def export_event(self, event: int) -> bytes: ...

    def open_event(self, handle: bytes) -> int: ...

    def record(self, event: int, stream: int) -> None:
        """The event passes when the work that is now on stream is done."""

    def has_passed(self, event: int) -> bool: ...

    def wait(self, event: int, stream: int) -> None:
        """Later work on stream runs after the event has passed. Does not block."""

    def synchronize(self, event: int) -> None:
        """Block until the event has passed."""

    def copy(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy from device to device memory on stream. Does not block."""

    def copy_from_host(self, destination: int, address: int, num_bytes: int, stream: int) -> None:
        """Enqueue a copy from registered host memory (`register_host`) on stream. Does not block."""

    def read(self, pointer: int, num_bytes: int) -> bytes:
        """Copy to the host and wait, without waiting for other work of the device."""

    def register_host(self, address: int, num_bytes: int) -> None:
        """Page-lock host memory that is mapped read-write here, so the device can read it in place."""

    def unregister_host(self, address: int) -> None: ...


OpenDevice = Callable[[bytes], DeviceApi]
"""UUID → the device in this process. Raises DeviceError if this process cannot use it."""
