"""The backend's side of shared buffers: which client has which memory, and which buffers are lent to the backend now.

The backend allocates a client's buffers when it connects, all of one size and kind, for this client alone. A buffer
belongs to the client except between its `BufferRef` and our `BufferReturn`. The memory is freed when the client has
reported that it closed it, or when its process has ended. The end of its connection alone does not free it.
"""

from __future__ import annotations

import logging
import os
import select
import threading

from penstock.shm.buffers.cuda_ipc import BLOCK_BYTES, ExportedDeviceMemory
from penstock.shm.buffers.device_api import DeviceApi, DeviceError, DeviceRow
from penstock.shm.buffers.host_memory import ExportedHostMemory
from penstock.shm.messages import (
    BufferContent,
    BufferGrant,
    BufferKind,
    BufferRef,
    BufferRequest,
    BufferReturn,
    ContentSpec,
)

logger = logging.getLogger("penstock.buffers")

_GRANULE_BYTES = {BufferKind.HOST: 4096, BufferKind.CUDA: BLOCK_BYTES}


class BufferRequestRefused(Exception):
    """The requested buffers cannot be granted. The message is one sentence for the client."""


class LoanError(ValueError):
    """An invalid `BufferRef`: the client cannot lend this buffer now, or the content or size is wrong."""


class Loan:
    """One buffer while it is lent. `write` and the reading of rows may run in another thread than `end`."""

    def __init__(self, memory: ExportedHostMemory | ExportedDeviceMemory, ref: BufferRef, spec: ContentSpec) -> None:
        self._memory = memory
        self._ref = ref
        self._lock = threading.Lock()
        self._is_open = True
        self._num_written = 0
        self.holds_hidden_states = ref.content is BufferContent.HIDDEN_STATES
        self.is_on_device = isinstance(memory, ExportedDeviceMemory)
        self.device_reads = memory.device_reads
        """The device can read it in place: `copy_rows` works."""
        self.row_bytes = spec.row_bytes

    def needs_row(self, row: int) -> bool:
        """Whether `write` would accept this row. The answer may be stale: another thread may end the loan."""
        return self._is_open and row <= self._num_written and row < self._ref.num_rows

    def write(self, row: int, source: memoryview | DeviceRow) -> None:
        """Write rows in order, from 0. Rows beyond the loan or after its end are dropped; a row may be repeated.

        source is row_bytes of host memory, or for a buffer on the device, device memory. Raises DeviceError.
        """
        with self._lock:
            if self.needs_row(row):
                self._memory.write(self._ref.index, row * self.row_bytes, self.row_bytes, source)
                self._num_written = max(self._num_written, row + 1)

    def check_written(self) -> None:
        """Raises LoanError if the client's write is not complete, or the device fails."""
        try:
            is_written = self._memory.is_written(self._ref.index)
        except DeviceError as error:
            raise LoanError(str(error)) from None
        if not is_written:
            raise LoanError(f"index is {self._ref.index}; the client lent this buffer before its write was complete")

    def read(self) -> bytes:
        """A copy of all lent rows. Raises LoanError like `check_written`."""
        self.check_written()
        try:
            return self._memory.read(self._ref.index, 0, self._ref.num_rows * self.row_bytes)
        except DeviceError as error:
            raise LoanError(str(error)) from None

    def read_rows(self, first: int, num_rows: int) -> bytes:
        """A copy of some rows of a buffer on the host; zeroes after `end`."""
        offset_bytes, num_bytes = self._place_of(first, num_rows)
        with self._lock:
            if self._is_open:
                return self._memory.read(self._ref.index, offset_bytes, num_bytes)
        return bytes(num_bytes)

    def copy_rows(self, first: int, num_rows: int, destination: DeviceRow) -> None:
        """Enqueue a copy of some rows on destination.stream; nothing after `end`. Raises DeviceError."""
        offset_bytes, num_bytes = self._place_of(first, num_rows)
        # In the lock: the buffer's event, and freeing its memory, must come after the copy.
        with self._lock:
            if self._is_open:
                self._memory.copy(self._ref.index, offset_bytes, num_bytes, destination)

    def _place_of(self, first: int, num_rows: int) -> tuple[int, int]:
        """(offset, length) in bytes."""
        if not 0 <= first <= first + num_rows <= self._ref.num_rows:
            raise ValueError(f"rows {first} to {first + num_rows} are requested; {self._ref.num_rows} are lent")
        return first * self.row_bytes, num_rows * self.row_bytes

    def end(self) -> BufferReturn:
        """Stop all writing and reading. Work that is enqueued on the device comes before the buffer's event."""
        with self._lock:
            self._is_open = False
        return BufferReturn(self._ref.index, self._ref.generation, self._num_written)


class ExportedBuffers:
    """One client's buffers."""

    def __init__(self, memory: ExportedHostMemory | ExportedDeviceMemory, grant: BufferGrant, pidfd: int) -> None:
        self._memory = memory
        self.grant = grant
        self._pidfd = pidfd
        self.is_closed = False
        """The client has reported that it closed them."""
        self._loans: dict[int, Loan] = {}  # by buffer index
        self._last_generations = [-1] * grant.num_buffers
        self.num_lent = 0
        self.num_returned = 0

    @property
    def fds(self) -> tuple[int, ...]:
        """Sent with the welcome."""
        return (self._memory.fd,) if isinstance(self._memory, ExportedHostMemory) else ()

    @property
    def num_bytes(self) -> int:
        return self.grant.num_buffers * self.grant.num_bytes

    def close_fds(self) -> None:
        """The client has received the fds, or never will."""
        if isinstance(self._memory, ExportedHostMemory):
            self._memory.close_fd()

    def borrow(self, ref: BufferRef, *, to_backend: bool) -> Loan:
        """Take the buffer until `give_back`. Raises LoanError with field, value and limit."""
        spec = self.grant.spec_of(ref.content)
        if spec is None or ref.content.to_backend is not to_backend:
            raise LoanError(f"content is {ref.content.name}; the backend does not offer it in this direction")
        if ref.index >= self.grant.num_buffers:
            raise LoanError(f"index is {ref.index}; there are {self.grant.num_buffers} buffers")
        if ref.num_rows * spec.row_bytes > self.grant.num_bytes:
            raise LoanError(f"num_rows is {ref.num_rows}; a buffer holds {self.grant.num_bytes // spec.row_bytes} rows")
        if ref.index in self._loans:
            raise LoanError(f"index is {ref.index}; this buffer is lent already")
        if ref.generation <= self._last_generations[ref.index]:
            raise LoanError(
                f"generation is {ref.generation}; it must be above {self._last_generations[ref.index]}, the last one"
            )
        loan = Loan(self._memory, ref, spec)
        self._loans[ref.index] = loan
        self._last_generations[ref.index] = ref.generation
        self.num_lent += 1
        return loan

    def give_back(self, loan: Loan) -> BufferReturn:
        """Call once per loan."""
        returned = loan.end()
        del self._loans[returned.index]
        self.num_returned += 1
        return returned

    def end_loans(self) -> None:
        """The client is gone: end all its loans."""
        for loan in list(self._loans.values()):
            self.give_back(loan)

    @property
    def is_abandoned(self) -> bool:
        """The client's process has ended, and its mappings with it."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def can_be_freed(self) -> bool:
        """Neither side still uses them. Does not block."""
        return (self.is_closed or self.is_abandoned) and not self._memory.is_awaited

    def free(self) -> None:
        """Call once, when `can_be_freed`."""
        os.close(self._pidfd)
        self._memory.free()

    def abandon(self) -> None:
        """Call instead of `free` when this process ends.

        Device memory that a client may have open is freed with this process. Host memory stays while it is mapped.
        """
        if isinstance(self._memory, ExportedHostMemory) and not self._memory.is_awaited:
            self.free()
        else:
            os.close(self._pidfd)
            self.close_fds()


class BufferExporter:
    """Allocates clients' buffers within one budget, and frees them. For one thread."""

    def __init__(
        self,
        kinds: tuple[BufferKind, ...],
        contents: tuple[ContentSpec, ...],
        budget_bytes: int,
        device: DeviceApi | None = None,
    ) -> None:
        """kinds in order of preference; CUDA needs a device. The device reads host buffers in place if it can."""
        if BufferKind.CUDA in kinds and device is None:
            raise ValueError("buffers on the device need a device")
        self._kinds = kinds
        self._contents = contents
        self._budget_bytes = budget_bytes
        self._orphans: list[ExportedBuffers] = []  # of clients that have left, until `can_be_freed`
        self.device = device
        self._page_locks = device is not None
        self.held_bytes = 0

    @property
    def num_orphans(self) -> int:
        return len(self._orphans)

    def export(self, buffer_request: BufferRequest, pid: int) -> ExportedBuffers:
        """Raises BufferRequestRefused."""
        kind = next((kind for kind in self._kinds if kind in buffer_request.kinds), None)
        if kind is None:
            usable, offered = (
                " or ".join(k.name.lower() for k in kinds) for kinds in (buffer_request.kinds, self._kinds)
            )
            raise BufferRequestRefused(f"the client can use {usable} buffers, the backend shares {offered} buffers")
        num_bytes = -(-buffer_request.num_bytes // _GRANULE_BYTES[kind]) * _GRANULE_BYTES[kind]
        left_bytes = self._budget_bytes - self.held_bytes
        if buffer_request.num_buffers * num_bytes > left_bytes:
            raise BufferRequestRefused(
                f"the client asks for {buffer_request.num_buffers} shared buffers of {num_bytes} bytes; "
                f"{left_bytes} of {self._budget_bytes} bytes are free: ask for less, or raise --shared-buffer-budget"
            )
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise BufferRequestRefused(f"the backend cannot watch the client's process: {error.strerror}") from None
        try:
            buffers = self._make(kind, buffer_request.num_buffers, num_bytes, pidfd)
        except (OSError, DeviceError) as error:
            os.close(pidfd)
            logger.warning("refused shared buffers for the client with pid %d: %s", pid, error)
            raise BufferRequestRefused("the backend has no memory for more shared buffers") from None
        self.held_bytes += buffers.num_bytes
        return buffers

    def _make(self, kind: BufferKind, num_buffers: int, num_bytes: int, pidfd: int) -> ExportedBuffers:
        if kind is BufferKind.HOST or self.device is None:
            host = ExportedHostMemory(num_buffers, num_bytes)
            self._page_lock(host)
            return ExportedBuffers(host, BufferGrant(kind, num_buffers, num_bytes, self._contents), pidfd)
        on_device = ExportedDeviceMemory(self.device, num_buffers, num_bytes)
        handles = on_device.memory_handles, on_device.event_handles
        grant = BufferGrant(kind, num_buffers, num_bytes, self._contents, self.device.uuid, *handles)
        return ExportedBuffers(on_device, grant, pidfd)

    def _page_lock(self, memory: ExportedHostMemory) -> None:
        if not self._page_locks or self.device is None:
            return
        try:
            memory.page_lock(self.device)
        except DeviceError as error:
            self._page_locks = False
            logger.info("cannot page-lock shared buffers on the host: %s; the GPU gets copies of embeddings", error)

    def release_client(self, buffers: ExportedBuffers, *, has_closed: bool) -> None:
        """The client has left. Free its memory once it can be freed.

        The device must first finish the enqueued copies. Nothing waits for them here: a device may hang.
        """
        buffers.end_loans()
        buffers.is_closed = has_closed
        self._orphans.append(buffers)
        self.reap()

    def reap(self) -> None:
        """Free what can be freed of clients that left. Call it regularly."""
        for buffers in [orphan for orphan in self._orphans if orphan.can_be_freed]:
            self._orphans.remove(buffers)
            self._free(buffers)

    def _free(self, buffers: ExportedBuffers) -> None:
        self.held_bytes -= buffers.num_bytes
        buffers.free()

    def close(self) -> None:
        """Call when all clients have left. Memory that some may have open is freed with this process."""
        self.reap()
        for buffers in self._orphans:
            self.held_bytes -= buffers.num_bytes
            buffers.abandon()
        self._orphans.clear()
