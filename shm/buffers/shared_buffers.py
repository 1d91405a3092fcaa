"""The client's side of shared buffers: take one, lend it with a request, read it when it returns, release it."""

from __future__ import annotations

import enum
import mmap
from dataclasses import dataclass
from typing import Any

from penstock.shm.buffers.cuda_ipc import ImportedDeviceMemory
from penstock.shm.buffers.device_api import OpenDevice
from penstock.shm.memory import region
from penstock.shm.messages import (
    MAX_CONTEXT_TOKENS,
    BufferContent,
    BufferGrant,
    BufferKind,
    BufferRef,
    BufferReturn,
    ContentSpec,
)


class BuffersExhausted(Exception):
    """No shared buffer is free now."""


class BufferGone(Exception):
    """The caller cannot access the buffer: it is lent, released, or its connection has ended."""


class _State(enum.Enum):
    FREE = enum.auto()
    HELD = enum.auto()
    """The caller of `take` holds it."""
    LENT = enum.auto()
    """A request has lent it to the backend."""


@dataclass(frozen=True, slots=True)
class BufferSlice:
    """How a request uses a buffer: the first num_rows rows, with this content, in or out."""

    buffer: SharedBuffer
    content: BufferContent
    num_rows: int
    stream: int = 0
    """The stream on which the caller used a buffer on the device. Lending waits for that stream."""


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """Device memory for torch.as_tensor or cupy.asarray. Do not use it after `release`."""

    __cuda_array_interface__: dict[str, Any]


class SharedBuffer:
    """One buffer of `num_bytes`. Only one side at a time may touch it: the caller from `take` until it is lent."""

    __slots__ = ("_generation", "_owner", "_state", "_to_release", "index", "num_bytes", "num_rows", "spec")

    def __init__(self, owner: SharedBuffers, index: int, num_bytes: int) -> None:
        self._owner = owner
        self._state = _State.FREE
        self._generation = 0
        self._to_release = False
        self.index = index
        self.num_bytes = num_bytes
        self.num_rows = 0
        """Rows that the backend wrote in the last loan."""
        self.spec: ContentSpec | None = None
        """The form of these rows."""

    @property
    def kind(self) -> BufferKind:
        return self._owner.grant.kind

    def view(self) -> memoryview:
        """All bytes of a buffer on the host, writable. Raises BufferGone."""
        return self._owner.host_view(self, self.num_bytes)

    def rows(self) -> memoryview[float] | memoryview[int]:
        """The rows that the backend wrote: read-only float32 or int32 values of shape [num_rows, num_values].

        Raises BufferGone.
        """
        spec = self._written()
        # A memoryview cannot be cast to a shape with 0 rows. A buffer that was lent holds at least one row.
        view = self._owner.host_view(self, max(1, self.num_rows) * spec.row_bytes).toreadonly()
        shape = [max(1, self.num_rows), spec.num_values]
        return view.cast("f" if spec.dtype == "<f4" else "i", shape)[: self.num_rows]

    def device_rows(self, stream: int = 0) -> DeviceArray:
        """Like `rows`, as device memory for later work on stream. Raises BufferGone, DeviceError."""
        spec = self._written()
        return self._owner.device_array(self, (self.num_rows, spec.num_values), spec.dtype, stream)

    def device_view(self, stream: int = 0) -> DeviceArray:
        """All bytes of a buffer on the device, for later work on stream to write. Raises BufferGone, DeviceError."""
        return self._owner.device_array(self, (self.num_bytes,), "|u1", stream)

    def release(self, stream: int = 0) -> None:
        """Idempotent. A lent buffer is released when it returns. stream is where the caller last used it."""
        self._owner.release(self, stream)

    def _written(self) -> ContentSpec:
        if self.spec is None:
            raise BufferGone(f"buffer {self.index} has no rows: it was not lent with a request yet")
        return self.spec


class SharedBuffers:
    """The buffers of one connection. For one thread, the client's."""

    def __init__(self, grant: BufferGrant, fds: tuple[int, ...], open_device: OpenDevice | None) -> None:
        """The fds stay the caller's. Raises RegionError, and DeviceError for memory that cannot be opened here."""
        self.grant = grant
        self._mapping: mmap.mmap | None = None
        self._device_memory: ImportedDeviceMemory | None = None
        if grant.kind is BufferKind.HOST:
            self._mapping = region.attach(fds[0], grant.num_buffers * grant.num_bytes, writable=True)
        elif open_device is None:
            raise region.RegionError("the backend grants buffers on a GPU; this client cannot open one")
        else:
            self._device_memory = ImportedDeviceMemory(grant, open_device)
        self._buffers = [SharedBuffer(self, index, grant.num_bytes) for index in range(grant.num_buffers)]
        self._is_connected = True
        self.num_lent = 0
        self.num_returned = 0

    @property
    def num_free(self) -> int:
        return sum(buffer._state is _State.FREE for buffer in self._buffers)

    @property
    def is_closed(self) -> bool:
        """All device memory is closed."""
        return not self._is_connected and (self._device_memory is None or self._device_memory.is_closed)

    # Called by users of the client

    def take(self) -> SharedBuffer:
        """A free buffer; it is the caller's until `release`. Raises BuffersExhausted, BufferGone."""
        if not self._is_connected:
            raise BufferGone("the connection of the shared buffers has ended")
        for buffer in self._buffers:
            if buffer._state is _State.FREE:
                buffer._state = _State.HELD
                buffer._to_release = False
                buffer.num_rows, buffer.spec = 0, None
                return buffer
        raise BuffersExhausted(f"all {len(self._buffers)} shared buffers are in use")

    def host_view(self, buffer: SharedBuffer, num_bytes: int) -> memoryview:
        self._check_held(buffer)
        if self._mapping is None:
            raise BufferGone(f"buffer {buffer.index} is on the device; use device_rows and device_view")
        start = buffer.index * self.grant.num_bytes
        return memoryview(self._mapping)[start : start + num_bytes]

    def device_array(self, buffer: SharedBuffer, shape: tuple[int, ...], dtype: str, stream: int) -> DeviceArray:
        self._check_held(buffer)
        memory = self._device_memory
        if memory is None:
            raise BufferGone(f"buffer {buffer.index} is on the host; use rows and view")
        memory.device.wait(memory.events[buffer.index], stream)
        # 1 is the default stream here: numba's "CUDA Array Interface (Version 3)".
        interface = {
            "shape": shape,
            "typestr": dtype,
            "data": (memory.pointers[buffer.index], False),
            "strides": None,
            "stream": stream or 1,
            "version": 3,
        }
        return DeviceArray(interface)

    def _check_held(self, buffer: SharedBuffer) -> None:
        if not self._is_connected:
            raise BufferGone("the connection of the shared buffer has ended")
        if buffer._state is not _State.HELD:
            raise BufferGone(f"buffer {buffer.index} is {buffer._state.name.lower()}")

    def release(self, buffer: SharedBuffer, stream: int) -> None:
        if buffer._state is _State.LENT:
            buffer._to_release = True
        elif buffer._state is _State.HELD:
            if (memory := self._device_memory) is not None and self._is_connected:
                # The buffer's next user waits for this event, which includes the backend's work on it.
                memory.device.wait(memory.events[buffer.index], stream)
                memory.device.record(memory.events[buffer.index], stream)
            self._free(buffer)

    def _free(self, buffer: SharedBuffer) -> None:
        buffer._state = _State.FREE
        if self._device_memory is not None and not self._is_connected:
            self._device_memory.close(buffer.index)

    # Called by the client

    def lend(self, prompt: object, output: BufferSlice | None) -> dict[str, BufferRef]:
        """Lend the buffers and return the message's fields that name them. A prompt that is not a slice is ignored.

        Raises ValueError with field, value and limit, BufferGone, and DeviceError; then nothing is lent.
        """
        source = prompt if isinstance(prompt, BufferSlice) else None
        if source is not None and output is not None and source.buffer is output.buffer:
            raise ValueError(f"output.buffer is {output.buffer.index}, the prompt's buffer; a buffer can be lent once")
        for part in (source, output):
            if part is not None:
                self._check(part, to_backend=part is source)
        for part in (source, output):
            if part is not None:
                self._settle(part)
        lent = {"tokens": source, "output": output}
        return {field: self._lend(part) for field, part in lent.items() if part is not None}

    def _check(self, part: BufferSlice, *, to_backend: bool) -> None:
        field = "token_ids" if to_backend else "output"
        if part.buffer._owner is not self:
            raise BufferGone("the connection of the shared buffer has ended")
        self._check_held(part.buffer)
        spec = self.grant.spec_of(part.content)
        if spec is None or part.content.to_backend is not to_backend:
            offered = ", ".join(s.content.name for s in self.grant.contents if s.content.to_backend is to_backend)
            raise ValueError(f"{field}.content is {part.content.name}; this backend offers {offered or 'none'}")
        limit = min(part.buffer.num_bytes // spec.row_bytes, MAX_CONTEXT_TOKENS)
        if not 1 <= part.num_rows <= limit:
            raise ValueError(f"{field}.num_rows is {part.num_rows}; the buffer holds 1 to {limit} rows")

    def _settle(self, part: BufferSlice) -> None:
        """Wait for the caller's work with the buffer on the device: the backend never waits for a client.

        Raises DeviceError.
        """
        if (memory := self._device_memory) is not None:
            memory.device.record(memory.events[part.buffer.index], part.stream)
            memory.device.synchronize(memory.events[part.buffer.index])

    def _lend(self, part: BufferSlice) -> BufferRef:
        buffer = part.buffer
        buffer._state = _State.LENT
        buffer._generation += 1
        buffer.num_rows, buffer.spec = 0, self.grant.spec_of(part.content)
        self.num_lent += 1
        return BufferRef(buffer.index, buffer._generation, part.content, part.num_rows)

    def take_back(self, index: int, generation: int, num_rows: int = 0) -> None:
        """A loan has ended, or was never sent. Raises ValueError if there is no such loan."""
        buffer = self._buffers[index] if index < len(self._buffers) else None
        if buffer is None or buffer._state is not _State.LENT or buffer._generation != generation:
            raise ValueError(f"the backend returns loan {generation} of shared buffer {index}, which is not lent")
        if buffer.spec is None or num_rows * buffer.spec.row_bytes > buffer.num_bytes:
            raise ValueError(f"the backend returns {num_rows} rows in buffer {index} of {buffer.num_bytes} bytes")
        self.num_returned += 1
        buffer.num_rows = num_rows
        buffer._state = _State.HELD
        if buffer._to_release:
            self._free(buffer)

    def accept(self, returned: tuple[BufferReturn, ...]) -> None:
        """Raises ValueError for a return without a loan."""
        for item in returned:
            self.take_back(item.index, item.generation, item.num_rows)

    def close(self) -> None:
        """The connection has ended. Idempotent.

        Device memory that the caller holds is closed on release, because its work may still use it. Host memory stays
        mapped while a view exists. Raises DeviceError.
        """
        self._is_connected = False
        self._mapping = None
        if self._device_memory is not None:
            for buffer in self._buffers:
                if buffer._state is not _State.HELD:
                    self._device_memory.close(buffer.index)
