"""The client's side of shared buffers: take one, lend it with a request, read it when it has come back, release it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.shm.buffers.cuda_ipc import ImportedDeviceMemory
from penstock.shm.memory import region
from penstock.shm.messages import MAX_CONTEXT_TOKENS, BufferContent, BufferKind, BufferRef, ContentSpec

if TYPE_CHECKING:
    import mmap

    from penstock.shm.buffers.device_api import OpenDevice
    from penstock.shm.messages import BufferGrant, BufferReturn, Submit


class BuffersExhausted(Exception):
    """None is free at this moment."""


class BufferGone(Exception):
    """The buffer is not the caller's to touch: lent, released, or gone with the connection that it came with."""


class _State(enum.Enum):
    FREE = enum.auto()
    HELD = enum.auto()
    """By the caller of `take`."""
    LENT = enum.auto()
    """To the backend, by a request."""


@dataclass(frozen=True, slots=True)
class BufferSlice:
    """What a request is to do with a buffer: the first num_rows rows of this content, from it or into it."""

    buffer: SharedBuffer
    content: BufferContent
    num_rows: int
    stream: int = 0
    """Of a buffer on the device: the stream on which the caller has written or read it. Lending waits for it."""


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """Rows on the device, to be given to torch.as_tensor or cupy.asarray; not to be used after `release`."""

    __cuda_array_interface__: dict[str, Any]


class SharedBuffer:
    """One buffer of `num_bytes`. Its content is to be touched by one side at a time, and only while it is held."""

    __slots__ = ("_generation", "_owner", "_state", "_to_release", "index", "num_bytes", "num_rows", "spec")

    def __init__(self, owner: SharedBuffers, index: int, num_bytes: int) -> None:
        self._owner = owner
        self._state = _State.FREE
        self._generation = 0
        self._to_release = False
        self.index = index
        self.num_bytes = num_bytes
        self.num_rows = 0
        """That the backend wrote when it was last lent."""
        self.spec: ContentSpec | None = None
        """Of these rows."""

    @property
    def kind(self) -> BufferKind:
        return self._owner.grant.kind

    def view(self) -> memoryview:
        """All of a buffer on the host, to be written. Raises BufferGone."""
        return self._owner.host_view(self, self.num_bytes)

    def rows(self) -> memoryview[float] | memoryview[int]:
        """What the backend wrote: read-only float32 or int32 values of shape [num_rows, num_values].

        Raises BufferGone.
        """
        spec = self._written()
        # A memoryview cannot be cast to a shape without rows, so cast at least one: a buffer that was lent has room.
        view = self._owner.host_view(self, max(1, self.num_rows) * spec.row_bytes).toreadonly()
        shape = [max(1, self.num_rows), spec.num_values]
        return view.cast("f" if spec.dtype == "<f4" else "i", shape)[: self.num_rows]

    def device_rows(self, stream: int = 0) -> DeviceArray:
        """What the backend wrote, [num_rows, num_values], for work put into stream from now on. Raises BufferGone."""
        spec = self._written()
        return self._owner.device_array(self, (self.num_rows, spec.num_values), spec.dtype, stream)

    def device_view(self, stream: int = 0) -> DeviceArray:
        """All of a buffer on the device as bytes, to be written by what stream is given from now on."""
        return self._owner.device_array(self, (self.num_bytes,), "|u1", stream)

    def release(self, stream: int = 0) -> None:
        """Idempotent. While it is lent it is released as it comes back. stream is where it was last used."""
        self._owner.release(self, stream)

    def _written(self) -> ContentSpec:
        if self.spec is None:
            raise BufferGone(f"buffer {self.index} has been lent to no request yet")
        return self.spec


class SharedBuffers:
    """The buffers that came with one connection. For one thread, the client's."""

    def __init__(self, grant: BufferGrant, fds: tuple[int, ...], open_device: OpenDevice | None) -> None:
        """The fds stay the caller's. Raises RegionError, and DeviceError for what cannot be opened here."""
        self.grant = grant
        self._mapping: mmap.mmap | None = None
        self._device_memory: ImportedDeviceMemory | None = None
        if grant.kind is BufferKind.HOST:
            self._mapping = region.attach(fds[0], grant.num_buffers * grant.num_bytes, writable=True)
        elif open_device is None:
            raise region.RegionError("buffers on a device for a client that cannot open one")
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
        """Nothing on the device is open any more."""
        return not self._is_connected and (self._device_memory is None or self._device_memory.is_closed)

    # The caller's

    def take(self) -> SharedBuffer:
        """A free buffer, the caller's until `release`. Raises BuffersExhausted, BufferGone."""
        if not self._is_connected:
            raise BufferGone("the connection that the buffers came with has ended")
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
            raise BufferGone(f"buffer {buffer.index} lies on the device")
        start = buffer.index * self.grant.num_bytes
        return memoryview(self._mapping)[start : start + num_bytes]

    def device_array(self, buffer: SharedBuffer, shape: tuple[int, ...], dtype: str, stream: int) -> DeviceArray:
        self._check_held(buffer)
        memory = self._device_memory
        if memory is None:
            raise BufferGone(f"buffer {buffer.index} lies on the host")
        memory.device.wait(memory.events[buffer.index], stream)
        # In this interface 1 is the default stream: numba's "CUDA Array Interface (Version 3)".
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
            raise BufferGone("the connection that the buffer came with has ended")
        if buffer._state is not _State.HELD:
            raise BufferGone(f"buffer {buffer.index} is {buffer._state.name.lower()}")

    def release(self, buffer: SharedBuffer, stream: int) -> None:
        if buffer._state is _State.LENT:
            buffer._to_release = True
        elif buffer._state is _State.HELD:
            if (memory := self._device_memory) is not None and self._is_connected:
                # Its next caller waits for this event: for the backend's work too, if nobody has waited for that yet.
                memory.device.wait(memory.events[buffer.index], stream)
                memory.device.record(memory.events[buffer.index], stream)
            self._free(buffer)

    def _free(self, buffer: SharedBuffer) -> None:
        buffer._state = _State.FREE
        if self._device_memory is not None and not self._is_connected:
            self._device_memory.close(buffer.index)

    # The client's

    def lend_with(self, submit: Submit, prompt: object, output: BufferSlice | None) -> Submit:
        """The submission with these buffers, which are the backend's now; a prompt that is no slice stays aside.

        Raises ValueError naming field, value and limit, BufferGone, DeviceError; then none is lent.
        """
        source = prompt if isinstance(prompt, BufferSlice) else None
        if source is not None and output is not None and source.buffer is output.buffer:
            raise ValueError(f"output.buffer is {output.buffer.index}, the prompt's; a buffer can be lent once")
        for part in (source, output):
            if part is not None:
                self._check(part, to_backend=part is source)
        for part in (source, output):
            if part is not None:
                self._settle(part)
        return msgspec.structs.replace(
            submit,
            tokens=submit.tokens if source is None else self._lend(source),
            output=None if output is None else self._lend(output),
        )

    def _check(self, part: BufferSlice, *, to_backend: bool) -> None:
        field = "token_ids" if to_backend else "output"
        if part.buffer._owner is not self:
            raise BufferGone("the connection that the buffer came with has ended")
        self._check_held(part.buffer)
        spec = self.grant.spec_of(part.content)
        if spec is None or part.content.to_backend is not to_backend:
            offered = ", ".join(s.content.name for s in self.grant.contents if s.content.to_backend is to_backend)
            raise ValueError(f"{field}.content is {part.content.name}; this backend offers {offered or 'none'}")
        limit = min(part.buffer.num_bytes // spec.row_bytes, MAX_CONTEXT_TOKENS)
        if not 1 <= part.num_rows <= limit:
            raise ValueError(f"{field}.num_rows is {part.num_rows}; the buffer holds 1 to {limit} rows")

    def _settle(self, part: BufferSlice) -> None:
        """Waits until the device has done what the caller told it to do with the buffer: the backend never waits for a
        client. Raises DeviceError."""
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
        """A loan has ended, or was never sent. Raises ValueError for one that is not out."""
        buffer = self._buffers[index] if index < len(self._buffers) else None
        if buffer is None or buffer._state is not _State.LENT or buffer._generation != generation:
            raise ValueError(f"loan {generation} of shared buffer {index} is returned, but not out")
        if buffer.spec is None or num_rows * buffer.spec.row_bytes > buffer.num_bytes:
            raise ValueError(f"{num_rows} rows are returned in shared buffer {index} of {buffer.num_bytes} bytes")
        self.num_returned += 1
        buffer.num_rows = num_rows
        buffer._state = _State.HELD
        if buffer._to_release:
            self._free(buffer)

    def accept(self, returned: tuple[BufferReturn, ...]) -> None:
        """Raises ValueError for a loan that is not out."""
        for item in returned:
            self.take_back(item.index, item.generation, item.num_rows)

    def close(self) -> None:
        """The connection has ended. Idempotent. What the caller still holds on the device is closed as it is released,
        for work that uses it may be under way; memory on the host stays as long as it is viewed. Raises DeviceError."""
        self._is_connected = False
        self._mapping = None
        if self._device_memory is not None:
            for buffer in self._buffers:
                if buffer._state is not _State.HELD:
                    self._device_memory.close(buffer.index)
