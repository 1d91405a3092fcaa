"""The GPU operations that shared buffers need. `cuda_driver` implements them; tests use a fake without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

HANDLE_BYTES = 64
"""Of a handle of memory or of an event."""
UUID_BYTES = 16


class DeviceError(Exception):
    """The device refused a call, or is none that can do this. The message is one line that names the call."""


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """Values on the device, as they are once the work that its stream holds now is done; or a place for some."""

    pointer: int
    stream: int


class DeviceApi(Protocol):
    """One GPU as one process sees it. Pointers, events and streams are the driver's, as integers; stream 0 is the
    default one. Calls may come from any thread, and each may raise DeviceError.
    """

    @property
    def uuid(self) -> bytes:
        """The GPU's, of UUID_BYTES: ordinals differ between processes."""
        ...

    def allocate(self, num_bytes: int) -> int:
        """An allocation of zeroes, its own and no part of another. Not to be called within a step: the device waits."""
        ...

    def free(self, pointer: int) -> None:
        """No other process may have it open."""
        ...

    def export_memory(self, pointer: int) -> bytes:
        """The handle of an allocation; it opens all of it."""
        ...

    def open_memory(self, handle: bytes) -> tuple[int, int]:
        """(pointer, bytes) of another process's allocation, until `close_memory`."""
        ...

    def close_memory(self, pointer: int) -> None: ...

    def create_event(self) -> int:
        """One that other processes can open; it has passed until it is recorded."""
        ...

    def destroy_event(self, event: int) -> None:
        """Of this process's own or opened ones."""
        ...

    def export_event(self, event: int) -> bytes: ...

    def open_event(self, handle: bytes) -> int: ...

    def record(self, event: int, stream: int) -> None:
        """The event passes once the work that stream holds now is done."""
        ...

    def has_passed(self, event: int) -> bool: ...

    def wait(self, event: int, stream: int) -> None:
        """What is put into stream from now on runs once the event has passed. Does not block."""
        ...

    def synchronize(self, event: int) -> None:
        """Blocks until the event has passed."""
        ...

    def copy(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        """From device memory to device memory, behind what stream holds. Does not block."""
        ...

    def copy_from_host(self, destination: int, address: int, num_bytes: int, stream: int) -> None:
        """From memory that `register_host` was given to device memory, behind what stream holds. Does not block."""
        ...

    def read(self, pointer: int, num_bytes: int) -> bytes:
        """Copies to the host and waits for that, beside whatever else the device does."""
        ...

    def register_host(self, address: int, num_bytes: int) -> None:
        """Page-locks host memory, mapped here for reading and writing, so that the device can read it in place."""
        ...

    def unregister_host(self, address: int) -> None: ...


if TYPE_CHECKING:
    OpenDevice = Callable[[bytes], DeviceApi]
    """From a UUID to the device in this process. Raises DeviceError where it cannot be used here."""
