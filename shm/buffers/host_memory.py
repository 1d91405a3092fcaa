"""Host memory that backend and client share: buffers in a memfd. A GPU reads it in place if it can."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os

from penstock.shm.buffers.device_api import DeviceApi, DeviceError, DeviceRow
from penstock.shm.memory import region

logger = logging.getLogger("penstock.buffers")


class ExportedHostMemory:
    """The backend's side of one client's buffers, back to back. The kernel frees them with the last mapping."""

    def __init__(self, num_buffers: int, num_bytes: int) -> None:
        """Zeroes, num_bytes per buffer. The fd is open until `close_fd`. Raises OSError: no memory or no fds."""
        self._num_bytes = num_bytes
        self.fd = region.create("penstock-buffers", num_buffers * num_bytes)
        try:
            region.seal(self.fd)
            self._mapping = region.attach(self.fd, num_buffers * num_bytes, writable=True)
        except OSError:
            self.close_fd()
            raise
        self._lock: PageLock | None = None

    def page_lock(self, device: DeviceApi) -> None:
        """Let the device read the buffers in place. Raises DeviceError if it cannot."""
        self._lock = PageLock(device, self._mapping)

    @property
    def device_reads(self) -> bool:
        return self._lock is not None

    @property
    def is_awaited(self) -> bool:
        """An enqueued copy is not done: `free` would wait for it."""
        return self._lock is not None and self._lock.is_awaited

    def close_fd(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def is_written(self, index: int) -> bool:  # noqa: ARG002 - the client wrote it before it lent it
        return True

    def read(self, index: int, offset_bytes: int, num_bytes: int) -> bytes:
        """A copy: the client can still change the buffer, so it is read only once."""
        start = index * self._num_bytes + offset_bytes
        return self._mapping[start : start + num_bytes]

    def write(self, index: int, offset_bytes: int, num_bytes: int, source: memoryview | DeviceRow) -> None:
        if not isinstance(source, memoryview) or source.nbytes != num_bytes:
            raise TypeError(f"a buffer on the host takes {num_bytes} bytes of host memory")
        start = index * self._num_bytes + offset_bytes
        self._mapping[start : start + num_bytes] = source.cast("B")

    def copy(self, index: int, offset_bytes: int, num_bytes: int, destination: DeviceRow) -> None:
        """Enqueue a copy to the device on destination.stream. Raises DeviceError."""
        if self._lock is None:
            raise TypeError("the device cannot read a buffer on the host that is not page-locked")
        self._lock.copy(index * self._num_bytes + offset_bytes, num_bytes, destination)

    def free(self) -> None:
        """Call when no more copies are enqueued. Waits for those that were."""
        self.close_fd()
        if self._lock is not None:
            self._lock.close()
        self._mapping.close()


class _PyBuffer(ctypes.Structure):
    """Py_buffer of the stable ABI: docs.python.org/3/c-api/buffer.html."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


class PageLock:
    """A mapping that a device reads in place, from `__init__` to `close`.

    It holds the mapping's buffer: closing the mapping while it is locked raises instead of unmapping it.
    """

    def __init__(self, device: DeviceApi, mapping: mmap.mmap) -> None:
        """Raises DeviceError if the device refuses."""
        self._device = device
        self._buffer = _PyBuffer()
        ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(mapping), ctypes.byref(self._buffer), 0)
        try:
            self._last_copy = device.create_event()
            try:
                device.register_host(self._buffer.buf, self._buffer.len)
            except DeviceError:
                device.destroy_event(self._last_copy)
                raise
        except DeviceError:
            ctypes.pythonapi.PyBuffer_Release(ctypes.byref(self._buffer))
            raise

    def copy(self, offset_bytes: int, num_bytes: int, destination: DeviceRow) -> None:
        """Enqueue a copy on destination.stream. Raises DeviceError, and ValueError outside the mapping."""
        if not 0 <= offset_bytes <= offset_bytes + num_bytes <= self._buffer.len:
            raise ValueError(f"{num_bytes} bytes at offset {offset_bytes}; the mapping has {self._buffer.len} bytes")
        self._device.copy_from_host(destination.pointer, self._buffer.buf + offset_bytes, num_bytes, destination.stream)
        self._device.record(self._last_copy, destination.stream)

    @property
    def is_awaited(self) -> bool:
        """The last copy is not done. False if the device fails."""
        try:
            return not self._device.has_passed(self._last_copy)
        except DeviceError:
            return False

    def close(self) -> None:
        """Call once, before the mapping is closed. Waits for the last copy."""
        try:
            self._device.synchronize(self._last_copy)
            self._device.destroy_event(self._last_copy)
            self._device.unregister_host(self._buffer.buf)
        except DeviceError as error:
            logger.error(
                "cannot unlock the pages of %d bytes of shared memory: %s; they stay locked until the backend ends",
                self._buffer.len,
                error,
            )
        finally:
            ctypes.pythonapi.PyBuffer_Release(ctypes.byref(self._buffer))
