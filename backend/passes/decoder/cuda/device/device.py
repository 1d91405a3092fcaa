"""One GPU as the pass sees it: torch tensors, kernels, and one stream in whose order everything runs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import Tensor

    from penstock.backend.passes.decoder.cuda.device.launcher import Launcher


class Event(Protocol):
    """A place in the stream."""

    def synchronize(self) -> None:
        """Blocks, without holding the interpreter, until all work up to the event is done. Any thread may call it."""
        ...


class Graph(Protocol):
    """Captured work. `torch.cuda.CUDAGraph` is one."""

    def replay(self) -> None:
        """Puts the work into the stream again, on the same addresses."""
        ...


class HostMemory(Protocol):
    """Page-locked memory of the host, which kernels read and write at the address that it has here."""

    @property
    def bytes(self) -> Tensor:
        """uint8 [num_bytes], whatever they held before."""
        ...

    def free(self) -> None:
        """Once, after the device's last use; `bytes` is not to be touched any more."""
        ...


class Device(Protocol):
    """All calls come from one thread, except where a docstring says otherwise."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def launcher(self) -> Launcher: ...

    @property
    def last_launch(self) -> str:
        """The kernel that was launched last, and its grid: for messages."""
        ...

    @property
    def num_sms(self) -> int:
        """Multiprocessors."""
        ...

    @property
    def shared_bytes_per_sm(self) -> int: ...

    @property
    def stream(self) -> int:
        """The driver's handle of the stream."""
        ...

    def pinned(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Page-locked host memory, from and to which copies with non_blocking=True do not wait."""
        ...

    def host_memory(self, num_bytes: int) -> HostMemory:
        """Return a block of exactly this size (`pinned` may round up to a power of two). Raises DeviceError."""
        ...

    def record(self) -> Event:
        """An event behind all work in the stream."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """What `work` puts into the stream, without running it. It may neither allocate nor wait."""
        ...

    def synchronize(self) -> None:
        """Waits for all work in the stream."""
        ...

    def trim(self) -> None:
        """Gives memory that nothing holds any more back to the system."""
        ...

    def check(self, doing: str) -> None:
        """After an error that came up while `doing`: raises DeviceLost where the device answers no more. Any thread may
        call it; it waits for all work in the stream."""
        ...


@contextmanager
def annotate_faults(device: Device, doing: str) -> Iterator[None]:
    """An error within becomes DeviceLost where the device answers no more; else it is told what was being done, and the
    kernel launched last. On any thread."""
    try:
        yield
    except Exception as error:
        device.check(doing)
        error.add_note(f"in {doing}; the kernel launched last was {device.last_launch}")
        raise
