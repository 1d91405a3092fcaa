"""One GPU as the pass sees it: torch tensors, kernels, and one stream that runs everything in order."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import Tensor

    from penstock.backend.passes.cuda.device.launcher import Launcher


class Event(Protocol):
    """A point in the stream."""

    def synchronize(self) -> None:
        """Block until all work before the event is done. Releases the GIL; any thread may call it."""


class Graph(Protocol):
    """Captured work. `torch.cuda.CUDAGraph` is one."""

    def replay(self) -> None:
        """Launch the work again, on the same addresses."""


class HostMemory(Protocol):
    """Page-locked host memory. Kernels use it at the same address as the host."""

    @property
    def bytes(self) -> Tensor:
        """uint8 [num_bytes], uninitialized."""

    def free(self) -> None:
        """Free the memory. Call once, after the device's last use; do not use `bytes` afterwards."""


class BlockRange(Protocol):
    """Consecutive addresses of the device with blocks of memory that no process owns. See `cuda_blocks.DeviceBlocks`,
    which has all but `tensor`. Every call may raise DeviceError."""

    @property
    def block_bytes(self) -> list[int]: ...

    def add(self, num_bytes: int) -> int: ...

    def map(self, fd: int, num_bytes: int) -> None: ...

    def read(self, begin: int, num_bytes: int) -> bytes:
        """Any thread may call it."""

    def tensor(self, begin: int, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], valid until `close`."""

    def close(self) -> None: ...


class Device(Protocol):
    """One thread makes all calls, unless a docstring says otherwise."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def launcher(self) -> Launcher: ...

    @property
    def last_launch(self) -> str:
        """The most recently launched kernel and its grid, for messages."""

    @property
    def uuid(self) -> bytes:
        """The GPU's identity."""

    @property
    def num_sms(self) -> int:
        """Number of streaming multiprocessors."""

    @property
    def shared_bytes_per_sm(self) -> int: ...

    @property
    def compute_capability(self) -> tuple[int, int]:
        """The architecture: sm_90 is (9, 0)."""

    @property
    def link_probe_bytes(self) -> int:
        """Size of a copy to or from the host that shows the speed of long ones."""

    @property
    def stream(self) -> int:
        """The driver's handle for the stream."""

    def pinned(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return page-locked host memory, for copies with non_blocking=True."""

    def host_memory(self, num_bytes: int) -> HostMemory:
        """Return a block of exactly this size (`pinned` may round up to a power of two). Raises DeviceError."""

    def block_range(self, max_bytes: int) -> BlockRange:
        """Return an empty range for at most max_bytes. Raises DeviceError if the device lacks such memory."""

    def record(self, done: Event | None = None) -> Event:
        """Return an event after all work in the stream: `done`, for which nobody waits any more, or a new one."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Capture what `work` launches, without running it. `work` must not allocate or wait."""

    def synchronize(self) -> None:
        """Wait for all work in the stream."""

    def trim(self) -> None:
        """Return free cached memory to the system."""

    def check(self, doing: str) -> None:
        """Raise DeviceLost if the device no longer works; call after an error. doing names the failed action.

        Waits for all work in the stream. Any thread may call it.
        """


@contextmanager
def annotate_faults(device: Device, doing: str) -> Iterator[None]:
    """Call `explain_fault` for an error in the block."""
    try:
        yield
    except Exception as error:
        explain_fault(device, error, doing)
        raise


def explain_fault(device: Device, error: Exception, doing: str) -> None:
    """Raise DeviceLost if the device no longer works; otherwise add a note to the error with the action and the last
    launch. Usable on any thread."""
    device.check(doing)
    error.add_note(f"in {doing}; last launch: {device.last_launch}")


def first_line(error: Exception) -> str:
    """The first line of an error of the driver or of torch, without the traces that follow."""
    return str(error).strip().partition("\n")[0]
