"""The backend's side of shared buffers: who has which memory, and which of it is lent to the backend at this moment.

A client's buffers are made as it arrives, all of one size and kind, and belong to it alone. Each is the client's but
for the time between its `BufferRef` and our `BufferReturn`. They go with the client: when it has said that it has
closed them, or its process is gone; the end of its connection alone says neither.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from typing import TYPE_CHECKING

from penstock.shm.buffers.cuda_ipc import BLOCK_BYTES, ExportedDeviceMemory
from penstock.shm.buffers.device_api import DeviceError
from penstock.shm.buffers.host_memory import ExportedHostMemory
from penstock.shm.messages import BufferContent, BufferGrant, BufferKind, BufferReturn

if TYPE_CHECKING:
    from penstock.shm.buffers.device_api import DeviceApi, DeviceRow
    from penstock.shm.messages import BufferRef, BufferRequest, ContentSpec

_log = logging.getLogger("penstock.buffers")

_GRANULE_BYTES = {BufferKind.HOST: 4096, BufferKind.CUDA: BLOCK_BYTES}


class BufferRequestRefused(Exception):
    """A client's buffer_request for buffers cannot be granted. The message is for the client, in one sentence."""


class LoanError(ValueError):
    """A `BufferRef` that lends nothing: not the client's to lend now, or not of this content or size."""


class Loan:
    """One buffer while it is the backend's. `write` and reading of rows may come from another thread than the end."""

    def __init__(self, memory: ExportedHostMemory | ExportedDeviceMemory, ref: BufferRef, spec: ContentSpec) -> None:
        self._memory = memory
        self._ref = ref
        self._lock = threading.Lock()
        self._is_open = True
        self._num_written = 0
        self.holds_hidden_states = ref.content is BufferContent.HIDDEN_STATES
        self.is_on_device = isinstance(memory, ExportedDeviceMemory)
        self.device_reads = memory.device_reads
        """`copy_rows` is possible."""
        self.row_bytes = spec.row_bytes

    def needs_row(self, row: int) -> bool:
        """Whether a `write` of this row would be more than dropped, as far as is known now."""
        return self._is_open and row <= self._num_written and row < self._ref.num_rows

    def write(self, row: int, source: memoryview | DeviceRow) -> None:
        """Row after row, from 0; rows beyond the loan, and all after its end, are dropped. Repeating a row is allowed.

        source is row_bytes of host memory, or a place on the device where the buffer is on it. Raises DeviceError.
        """
        with self._lock:
            if self.needs_row(row):
                self._memory.write(self._ref.index, row * self.row_bytes, self.row_bytes, source)
                self._num_written = max(self._num_written, row + 1)

    def check_written(self) -> None:
        """Raises LoanError where the client has not written what it lends, or the device fails."""
        try:
            is_written = self._memory.is_written(self._ref.index)
        except DeviceError as error:
            raise LoanError(str(error)) from None
        if not is_written:
            raise LoanError(f"index is {self._ref.index}; this buffer was lent before it was written")

    def read(self) -> bytes:
        """A copy of all that the client has written. Raises LoanError where it has not, or the device fails."""
        self.check_written()
        try:
            return self._memory.read(self._ref.index, 0, self._ref.num_rows * self.row_bytes)
        except DeviceError as error:
            raise LoanError(str(error)) from None

    def read_rows(self, first: int, num_rows: int) -> bytes:
        """A copy of some rows of a buffer on the host; zeroes after the end."""
        offset_bytes, num_bytes = self._place_of(first, num_rows)
        with self._lock:
            if self._is_open:
                return self._memory.read(self._ref.index, offset_bytes, num_bytes)
        return bytes(num_bytes)

    def copy_rows(self, first: int, num_rows: int, there: DeviceRow) -> None:
        """Puts a copy of some rows behind the work of there.stream; nothing after the end. Raises DeviceError."""
        offset_bytes, num_bytes = self._place_of(first, num_rows)
        # Within the lock, so that the buffer's event, and freeing its memory, come behind the copy.
        with self._lock:
            if self._is_open:
                self._memory.copy(self._ref.index, offset_bytes, num_bytes, there)

    def _place_of(self, first: int, num_rows: int) -> tuple[int, int]:
        """Its offset and length in bytes."""
        if not 0 <= first <= first + num_rows <= self._ref.num_rows:
            raise ValueError(f"rows {first} to {first + num_rows} are wanted; {self._ref.num_rows} are lent")
        return first * self.row_bytes, num_rows * self.row_bytes

    def end(self) -> BufferReturn:
        """Nothing is written or read from now on. What the device was told to do comes before the buffer's event."""
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
        """The client has said that it has closed them."""
        self._loans: dict[int, Loan] = {}  # by the index of their buffer
        self._last_generations = [-1] * grant.num_buffers
        self.num_lent = 0
        self.num_returned = 0

    @property
    def fds(self) -> tuple[int, ...]:
        """What rides along with the welcome."""
        return (self._memory.fd,) if isinstance(self._memory, ExportedHostMemory) else ()

    @property
    def num_bytes(self) -> int:
        return self.grant.num_buffers * self.grant.num_bytes

    def close_fds(self) -> None:
        """The client has received them, or never will."""
        if isinstance(self._memory, ExportedHostMemory):
            self._memory.close_fd()

    def borrow(self, ref: BufferRef, *, to_backend: bool) -> Loan:
        """The buffer is ours until `give_back`. Raises LoanError naming field, value and limit."""
        spec = self.grant.spec_of(ref.content)
        if spec is None or ref.content.to_backend is not to_backend:
            raise LoanError(f"content is {ref.content.name}; this is not offered here")
        if ref.index >= self.grant.num_buffers:
            raise LoanError(f"index is {ref.index}; there are {self.grant.num_buffers} buffers")
        if ref.num_rows * spec.row_bytes > self.grant.num_bytes:
            raise LoanError(f"num_rows is {ref.num_rows}; a buffer holds {self.grant.num_bytes // spec.row_bytes}")
        if ref.index in self._loans:
            raise LoanError(f"index is {ref.index}; this buffer is lent already")
        if ref.generation <= self._last_generations[ref.index]:
            raise LoanError(f"generation is {ref.generation}; that was used before")
        loan = Loan(self._memory, ref, spec)
        self._loans[ref.index] = loan
        self._last_generations[ref.index] = ref.generation
        self.num_lent += 1
        return loan

    def give_back(self, loan: Loan) -> BufferReturn:
        """To be called once for each loan."""
        returned = loan.end()
        del self._loans[returned.index]
        self.num_returned += 1
        return returned

    def end_loans(self) -> None:
        """Nothing is written from now on: the client is gone."""
        for loan in list(self._loans.values()):
            self.give_back(loan)

    @property
    def is_abandoned(self) -> bool:
        """The client's process is gone, and its mappings with it."""
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def can_be_freed(self) -> bool:
        """By neither side anything is done with them any more. Does not block."""
        return (self.is_closed or self.is_abandoned) and not self._memory.is_awaited

    def free(self) -> None:
        """To be called once; nobody has the memory open any more, nor reads it."""
        os.close(self._pidfd)
        self._memory.free()

    def abandon(self) -> None:
        """To be called instead, as this process ends. What others may have open on the device goes with the process;
        memory on the host stays with who has it mapped."""
        if isinstance(self._memory, ExportedHostMemory) and not self._memory.is_awaited:
            self.free()
        else:
            os.close(self._pidfd)
            self.close_fds()


class BufferExporter:
    """Makes clients' buffers within one budget and takes them back. For one thread."""

    def __init__(
        self,
        kinds: tuple[BufferKind, ...],
        contents: tuple[ContentSpec, ...],
        budget_bytes: int,
        device: DeviceApi | None = None,
    ) -> None:
        """kinds in order of preference; CUDA needs a device, which reads buffers on the host in place if it can."""
        if BufferKind.CUDA in kinds and device is None:
            raise ValueError("buffers on the device need a device")
        self._kinds = kinds
        self._contents = contents
        self._budget_bytes = budget_bytes
        self._orphans: list[ExportedBuffers] = []  # of clients that left, until they can be freed
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
                f"{buffer_request.num_buffers} shared buffers of {num_bytes} bytes are wanted; "
                f"{left_bytes} of {self._budget_bytes} bytes are left"
            )
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise BufferRequestRefused(f"the client's process cannot be watched: {error.strerror}") from None
        try:
            buffers = self._make(kind, buffer_request.num_buffers, num_bytes, pidfd)
        except (OSError, DeviceError) as error:
            os.close(pidfd)
            _log.warning("a client (pid %d) gets no shared buffers: %s", pid, error)
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
            _log.info("shared buffers on the host are not page-locked, and so copied there before use: %s", error)

    def release_client(self, buffers: ExportedBuffers, *, has_closed: bool) -> None:
        """The client has left. Its memory goes once it has said that it has closed it, or its process is gone; and
        once the device has read what it was told to, for which nobody waits here: a device may hang."""
        buffers.end_loans()
        buffers.is_closed = has_closed
        self._orphans.append(buffers)
        self.reap()

    def reap(self) -> None:
        """Frees what it can by now of those who left; to be called now and then."""
        for buffers in [orphan for orphan in self._orphans if orphan.can_be_freed]:
            self._orphans.remove(buffers)
            self._free(buffers)

    def _free(self, buffers: ExportedBuffers) -> None:
        self.held_bytes -= buffers.num_bytes
        buffers.free()

    def close(self) -> None:
        """All clients have left. What some of them may have open goes with this process."""
        self.reap()
        for buffers in self._orphans:
            self.held_bytes -= buffers.num_bytes
            buffers.abandon()
        self._orphans.clear()
