"""Device memory that belongs to no process: blocks with file descriptors, mapped at consecutive addresses.

The driver frees a block when no process maps it and no descriptor of it is open. So the memory of a process that dies
needs nobody to free it, and a descriptor that waits in a socket keeps a block alive (`shm.memory.fd_mailbox`).
Signatures and structures: cuda.h, CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from typing import Any, Protocol

from penstock.shm.buffers.device_api import DeviceError

_HAS_FD_HANDLES = 103  # CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
_PINNED = _FILE_DESCRIPTOR = _ON_DEVICE = 1
_MINIMUM_GRANULARITY = 0
_READ_WRITE = 3


class _Location(ctypes.Structure):
    """CUmemLocation"""

    _fields_ = (("kind", c_int), ("device", c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4),
    )  # fmt: skip


class _Properties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("kind", c_int), ("handles", c_int), ("location", _Location), ("win32", c_void_p), ("flags", _Flags),
    )  # fmt: skip


class _Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = (("location", _Location), ("flags", c_int))


_HANDLE, _POINTER = c_uint64, c_uint64

BLOCK_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(_Properties), c_int),
    "cuMemAddressReserve": (POINTER(_POINTER), c_size_t, c_size_t, _POINTER, c_uint64),
    "cuMemAddressFree": (_POINTER, c_size_t),
    "cuMemCreate": (POINTER(_HANDLE), c_size_t, POINTER(_Properties), c_uint64),
    "cuMemRelease": (_HANDLE,),
    "cuMemMap": (_POINTER, c_size_t, c_size_t, _HANDLE, c_uint64),
    "cuMemUnmap": (_POINTER, c_size_t),
    "cuMemSetAccess": (_POINTER, c_size_t, POINTER(_Access), c_size_t),
    "cuMemExportToShareableHandle": (POINTER(c_int), _HANDLE, c_int, c_uint64),
    "cuMemImportFromShareableHandle": (POINTER(_HANDLE), c_void_p, c_int),
}
"""Part of the signatures of `cuda_driver`."""


class Driver(Protocol):
    """The part of `cuda_driver.DriverContext` that is used here."""

    @property
    def handle(self) -> int: ...

    def call(self, name: str, *arguments: object) -> None: ...

    def read(self, pointer: int, num_bytes: int) -> bytes: ...


class DeviceBlocks:
    """A range of addresses, filled from its beginning with blocks of this or another process."""

    def __init__(self, device: Driver, max_bytes: int) -> None:
        """Reserve addresses; memory comes with the blocks. Raises DeviceError, also if the device lacks such memory."""
        self._device = device
        supported, granularity, start = c_int(), c_size_t(), _POINTER()
        location = _Location(_ON_DEVICE, device.handle)
        self._properties = _Properties(_PINNED, _FILE_DESCRIPTOR, location)
        self._access = _Access(location, _READ_WRITE)
        device.call("cuDeviceGetAttribute", ctypes.byref(supported), _HAS_FD_HANDLES, device.handle)
        if not supported.value:
            raise DeviceError("the device gives no file descriptors of its memory")
        device.call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(granularity), ctypes.byref(self._properties), _MINIMUM_GRANULARITY,
        )  # fmt: skip
        self._granularity = granularity.value
        self._reserved_bytes = self._whole(max_bytes)
        device.call("cuMemAddressReserve", ctypes.byref(start), self._reserved_bytes, 0, 0, 0)
        self.pointer = start.value
        """The first address of the range."""
        self.block_bytes: list[int] = []
        """Of each block, in the order of addresses."""

    @property
    def num_bytes(self) -> int:
        """Memory that is mapped now."""
        return sum(self.block_bytes)

    def add(self, num_bytes: int) -> int:
        """Allocate a block of at least this size, with any content, and map it behind the others. Return its fd, which
        the caller closes. Raises DeviceError."""
        handle, fd, size = _HANDLE(), c_int(-1), self._whole(num_bytes)
        self._device.call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), 0)
        try:
            self._map(handle, size)
            self._device.call("cuMemExportToShareableHandle", ctypes.byref(fd), handle, _FILE_DESCRIPTOR, 0)
        finally:
            self._device.call("cuMemRelease", handle)
        return fd.value

    def map(self, fd: int, num_bytes: int) -> None:
        """Map a block of another process behind the others. num_bytes is its size; the fd stays the caller's.

        Raises DeviceError.
        """
        handle = _HANDLE()
        self._device.call("cuMemImportFromShareableHandle", ctypes.byref(handle), c_void_p(fd), _FILE_DESCRIPTOR)
        try:
            self._map(handle, num_bytes)
        finally:
            self._device.call("cuMemRelease", handle)

    def read(self, begin: int, num_bytes: int) -> bytes:
        """A copy on the host, as `DeviceApi.read`."""
        return self._device.read(self.pointer + begin, num_bytes)

    def close(self) -> None:
        """Call when the device no longer uses the range. Raises DeviceError."""
        begin = self.pointer
        while self.block_bytes:
            size = self.block_bytes.pop(0)
            self._device.call("cuMemUnmap", begin, size)
            begin += size
        self._device.call("cuMemAddressFree", self.pointer, self._reserved_bytes)

    def _map(self, handle: c_uint64, size: int) -> None:
        begin = self.pointer + self.num_bytes
        if self.num_bytes + size > self._reserved_bytes:
            raise DeviceError(f"blocks of {self.num_bytes + size} bytes; {self._reserved_bytes} are reserved")
        self._device.call("cuMemMap", begin, size, 0, handle, 0)
        try:
            self._device.call("cuMemSetAccess", begin, size, ctypes.byref(self._access), 1)
        except DeviceError:
            self._device.call("cuMemUnmap", begin, size)
            raise
        self.block_bytes.append(size)

    def _whole(self, num_bytes: int) -> int:
        return max(1, -(-num_bytes // self._granularity)) * self._granularity
