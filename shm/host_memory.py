"""Host memory that backend and client share: buffers in a memfd, and mappings that the GPU may read in place."""

from __future__ import annotations

import ctypes
import logging
import os
from typing import TYPE_CHECKING

from shm import region
from shm.device_api import DeviceError

if TYPE_CHECKING:
    import mmap

    from shm.device_api import DeviceApi, DeviceRow

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

    def free(self) -> None:
        self.close_fd()
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


class HostRegistration:
    """A mapping that is page-locked for the device, from `__init__` to `close`.

    It holds the mapping's buffer, so that unmapping it before it is unregistered raises instead of happening.
    """

    def __init__(self, device: DeviceApi, mapping: mmap.mmap) -> None:
        """Raises DeviceError: the device refuses."""
        self._device = device
        self._buffer = _PyBuffer()
        ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(mapping), ctypes.byref(self._buffer), 0)
        try:
            device.register_host(self._buffer.buf, self._buffer.len)
        except DeviceError:
            ctypes.pythonapi.PyBuffer_Release(ctypes.byref(self._buffer))
            raise

    def close(self) -> None:
        """To be called once, before the mapping is closed."""
        try:
            self._device.unregister_host(self._buffer.buf)
        except DeviceError as error:
            _log.error("a prompt arena is not unregistered: %s", error)
        finally:
            ctypes.pythonapi.PyBuffer_Release(ctypes.byref(self._buffer))
