"""Host memory that backend and client share: buffers in a memfd, which a GPU reads in place where it can."""

from __future__ import annotations

import ctypes
import logging
import os
from typing import TYPE_CHECKING

from penstock.shm.buffers.device_api import DeviceError
from penstock.shm.memory import region

if TYPE_CHECKING:
    import mmap

    from penstock.shm.buffers.device_api import DeviceApi, DeviceRow

_log = logging.getLogger("penstock.buffers")


class ExportedHostMemory:
    """The backend's side of one client's buffers, back to back; the kernel frees them with the last who has them."""

    def __init__(self, num_buffers: int, num_bytes: int) -> None:
        """Zeroes, num_bytes of each. The fd is open until `close_fd`. Raises OSError: no memory, no fds."""
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
        """From now on the device reads the buffers in place. Raises DeviceError: it will not."""
        self._lock = PageLock(device, self._mapping)

    @property
    def device_reads(self) -> bool:
        return self._lock is not None

    @property
    def is_awaited(self) -> bool:
        """A copy that was put into a stream is not done: `free` would wait for it."""
        return self._lock is not None and self._lock.is_awaited

    def close_fd(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def is_written(self, index: int) -> bool:  # noqa: ARG002 - who lends it wrote it before
        return True

    def read(self, index: int, offset_bytes: int, num_bytes: int) -> bytes:
        """Copies out: what the client may still change is never looked at twice."""
        start = index * self._num_bytes + offset_bytes
        return self._mapping[start : start + num_bytes]

    def write(self, index: int, offset_bytes: int, num_bytes: int, source: memoryview | DeviceRow) -> None:
        if not isinstance(source, memoryview) or source.nbytes != num_bytes:
            raise TypeError(f"a buffer on the host is filled with {num_bytes} bytes of the host")
        start = index * self._num_bytes + offset_bytes
        self._mapping[start : start + num_bytes] = source.cast("B")

    def copy(self, index: int, offset_bytes: int, num_bytes: int, there: DeviceRow) -> None:
        """Puts a copy of what the client has written behind the work of there.stream. Raises DeviceError."""
        if self._lock is None:
            raise TypeError("a buffer on the host that is not page-locked cannot be read by the device")
        self._lock.copy(index * self._num_bytes + offset_bytes, num_bytes, there)

    def free(self) -> None:
        """To be called once no copy is put into a stream any more: waits for those that were."""
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

    It holds the mapping's buffer, so that unmapping it before it is unlocked raises instead of happening.
    """

    def __init__(self, device: DeviceApi, mapping: mmap.mmap) -> None:
        """Raises DeviceError: the device refuses."""
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

    def copy(self, offset_bytes: int, num_bytes: int, there: DeviceRow) -> None:
        """Behind the work of there.stream; does not block. Raises DeviceError, and ValueError for what is not there."""
        if not 0 <= offset_bytes <= offset_bytes + num_bytes <= self._buffer.len:
            raise ValueError(f"{num_bytes} bytes at {offset_bytes} are wanted; there are {self._buffer.len}")
        self._device.copy_from_host(there.pointer, self._buffer.buf + offset_bytes, num_bytes, there.stream)
        self._device.record(self._last_copy, there.stream)

    @property
    def is_awaited(self) -> bool:
        """The last copy is not done, as far as the device tells."""
        try:
            return not self._device.has_passed(self._last_copy)
        except DeviceError:
            return False

    def close(self) -> None:
        """To be called once, before the mapping is closed. Waits for the last copy."""
        try:
            self._device.synchronize(self._last_copy)
            self._device.destroy_event(self._last_copy)
            self._device.unregister_host(self._buffer.buf)
        except DeviceError as error:
            _log.error("shared memory stays page-locked: %s", error)
        finally:
            ctypes.pythonapi.PyBuffer_Release(ctypes.byref(self._buffer))
