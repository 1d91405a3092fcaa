"""`DeviceApi` on a real GPU, through the driver's own library and ctypes. It needs no package and no CUDA runtime.

It uses the device's primary context, as torch and cupy do, so their pointers and streams are valid here. The library is
loaded with the first device, so importing this module needs no driver. Signatures: cuda.h, CUDA 12 and 13.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

from penstock.shm.buffers.cuda_blocks import BLOCK_SIGNATURES
from penstock.shm.buffers.device_api import HANDLE_BYTES, UUID_BYTES, DeviceError

_LIBRARY = "libcuda.so.1"
_NOT_READY = 600
_STREAM_NON_BLOCKING = 1
_EVENT_BLOCKING_SYNC, _EVENT_DISABLE_TIMING, _EVENT_INTERPROCESS = 1, 2, 4
_IPC_LAZY_ENABLE_PEER_ACCESS = 1
_REGISTER_PORTABLE = 1
_HOST_ALLOC_DEVICE_MAP = 2


class _Handle(ctypes.Structure):
    """CUipcMemHandle and CUipcEventHandle, which are passed by value."""

    _fields_ = (("reserved", c_ubyte * HANDLE_BYTES),)


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", c_ubyte * UUID_BYTES),)


_DEVICE, _POINTER, _EVENT, _STREAM, _CONTEXT = c_int, c_uint64, c_void_p, c_void_p, c_void_p

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(_DEVICE), c_int),
    "cuDeviceGetUuid_v2": (POINTER(_Uuid), _DEVICE),
    "cuDevicePrimaryCtxRetain": (POINTER(_CONTEXT), _DEVICE),
    "cuCtxPushCurrent_v2": (_CONTEXT,),
    "cuCtxPopCurrent_v2": (POINTER(_CONTEXT),),
    "cuStreamCreate": (POINTER(_STREAM), c_uint),
    "cuStreamSynchronize": (_STREAM,),
    "cuStreamWaitEvent": (_STREAM, _EVENT, c_uint),
    "cuMemAlloc_v2": (POINTER(_POINTER), c_size_t),
    "cuMemFree_v2": (_POINTER,),
    "cuMemGetAddressRange_v2": (POINTER(_POINTER), POINTER(c_size_t), _POINTER),
    "cuMemsetD8Async": (_POINTER, c_ubyte, c_size_t, _STREAM),
    "cuMemcpyDtoDAsync_v2": (_POINTER, _POINTER, c_size_t, _STREAM),
    "cuMemcpyDtoHAsync_v2": (c_void_p, _POINTER, c_size_t, _STREAM),
    "cuMemcpyHtoDAsync_v2": (_POINTER, c_void_p, c_size_t, _STREAM),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuIpcGetMemHandle": (POINTER(_Handle), _POINTER),
    "cuIpcOpenMemHandle_v2": (POINTER(_POINTER), _Handle, c_uint),
    "cuIpcCloseMemHandle": (_POINTER,),
    "cuIpcGetEventHandle": (POINTER(_Handle), _EVENT),
    "cuIpcOpenEventHandle": (POINTER(_EVENT), _Handle),
    "cuEventCreate": (POINTER(_EVENT), c_uint),
    "cuEventDestroy_v2": (_EVENT,),
    "cuEventRecord": (_EVENT, _STREAM),
    "cuEventQuery": (_EVENT,),
    "cuEventSynchronize": (_EVENT,),
    **BLOCK_SIGNATURES,
}


class _Driver:
    """The library. A call that fails raises DeviceError."""

    def __init__(self, library: str) -> None:
        try:
            self._library = ctypes.CDLL(library)
            for name, arguments in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = arguments, c_int
        except (OSError, AttributeError) as error:
            raise DeviceError(f"no usable CUDA driver: {error}") from None
        self.call("cuInit", 0)

    def status(self, name: str, *arguments: object) -> int:
        return int(getattr(self._library, name)(*arguments))

    def call(self, name: str, *arguments: object) -> None:
        if (status := self.status(name, *arguments)) != 0:
            raise self.error(name, status)

    def error(self, name: str, status: int) -> DeviceError:
        text = c_char_p()
        self._library.cuGetErrorName(status, ctypes.byref(text))
        return DeviceError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")


class DriverContext:
    """The device's primary context, retained until the process ends, and calls in it."""

    def __init__(self, ordinal: int, library: str = _LIBRARY) -> None:
        """ordinal counts the devices that the process sees."""
        self._driver = _Driver(library)
        count = c_int()
        self._driver.call("cuDeviceGetCount", ctypes.byref(count))
        if not 0 <= ordinal < count.value:
            raise DeviceError(f"device {ordinal}; this process sees {count.value} devices")
        device, uuid = _DEVICE(), _Uuid()
        self._driver.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._driver.call("cuDeviceGetUuid_v2", ctypes.byref(uuid), device)
        self.uuid = bytes(uuid.bytes)
        self.handle: int = device.value
        """The driver's name for the device."""
        self._context = _CONTEXT()
        self._driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        # Reads and fills run on this stream: on the default stream they would wait for the running step.
        self._stream = _STREAM()
        self.call("cuStreamCreate", ctypes.byref(self._stream), _STREAM_NON_BLOCKING)

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Make this device's context current in the calling thread."""
        self._driver.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._driver.call("cuCtxPopCurrent_v2", ctypes.byref(_CONTEXT()))

    def call(self, name: str, *arguments: object) -> None:
        """Call a function of the driver. Raises DeviceError."""
        with self._current():
            self._driver.call(name, *arguments)

    def fill(self, pointer: int, value: int, num_bytes: int) -> None:
        """Set all bytes to value and wait, without waiting for other work of the device."""
        with self._current():
            self._driver.call("cuMemsetD8Async", pointer, value, num_bytes, self._stream)
            self._driver.call("cuStreamSynchronize", self._stream)

    def read(self, pointer: int, num_bytes: int) -> bytes:
        data = ctypes.create_string_buffer(num_bytes)
        with self._current():
            self._driver.call("cuMemcpyDtoHAsync_v2", data, pointer, num_bytes, self._stream)
            self._driver.call("cuStreamSynchronize", self._stream)
        return data.raw


class DriverDevice(DriverContext):
    """A `DeviceApi` that calls the CUDA driver."""

    def allocate(self, num_bytes: int) -> int:
        pointer = _POINTER()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), num_bytes)
        try:
            self.fill(pointer.value, 0, num_bytes)
        except DeviceError:
            self.free(pointer.value)
            raise
        return pointer.value

    def free(self, pointer: int) -> None:
        self.call("cuMemFree_v2", pointer)

    def export_memory(self, pointer: int) -> bytes:
        handle = _Handle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        return bytes(handle.reserved)

    def open_memory(self, handle: bytes) -> tuple[int, int]:
        pointer, base, num_bytes = _POINTER(), _POINTER(), c_size_t()
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), _handle(handle), _IPC_LAZY_ENABLE_PEER_ACCESS)
        try:
            self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(num_bytes), pointer)
        except DeviceError:
            self.close_memory(pointer.value)
            raise
        return pointer.value, num_bytes.value - (pointer.value - base.value)

    def close_memory(self, pointer: int) -> None:
        self.call("cuIpcCloseMemHandle", pointer)

    def create_event(self) -> int:
        event = _EVENT()
        flags = _EVENT_BLOCKING_SYNC | _EVENT_DISABLE_TIMING | _EVENT_INTERPROCESS
        self.call("cuEventCreate", ctypes.byref(event), flags)
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        self.call("cuEventDestroy_v2", event)

    def export_event(self, event: int) -> bytes:
        handle = _Handle()
        self.call("cuIpcGetEventHandle", ctypes.byref(handle), event)
        return bytes(handle.reserved)

    def open_event(self, handle: bytes) -> int:
        event = _EVENT()
        self.call("cuIpcOpenEventHandle", ctypes.byref(event), _handle(handle))
        return event.value or 0

    def record(self, event: int, stream: int) -> None:
        self.call("cuEventRecord", event, stream)

    def has_passed(self, event: int) -> bool:
        with self._current():
            status = self._driver.status("cuEventQuery", event)
        if status not in (0, _NOT_READY):
            raise self._driver.error("cuEventQuery", status)
        return status == 0

    def wait(self, event: int, stream: int) -> None:
        self.call("cuStreamWaitEvent", stream, event, 0)

    def synchronize(self, event: int) -> None:
        self.call("cuEventSynchronize", event)

    def copy(self, destination: int, source: int, num_bytes: int, stream: int) -> None:
        self.call("cuMemcpyDtoDAsync_v2", destination, source, num_bytes, stream)

    def copy_from_host(self, destination: int, address: int, num_bytes: int, stream: int) -> None:
        self.call("cuMemcpyHtoDAsync_v2", destination, address, num_bytes, stream)

    def allocate_host(self, num_bytes: int) -> int:
        """Page-locked host memory that host and device read and write.

        Its address is also the device's pointer. Unified addressing guarantees that for allocated memory, and not for
        registered memory.
        """
        address = c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(address), num_bytes, _HOST_ALLOC_DEVICE_MAP)
        return address.value or 0

    def free_host(self, address: int) -> None:
        """Free what `allocate_host` returned."""
        self.call("cuMemFreeHost", address)

    def register_host(self, address: int, num_bytes: int) -> None:
        self.call("cuMemHostRegister_v2", address, num_bytes, _REGISTER_PORTABLE)

    def unregister_host(self, address: int) -> None:
        self.call("cuMemHostUnregister", address)


def _handle(data: bytes) -> _Handle:
    if len(data) != HANDLE_BYTES:
        raise DeviceError(f"a handle of {len(data)} bytes, expected {HANDLE_BYTES}")
    return _Handle.from_buffer_copy(data)


def open_device(uuid: bytes, library: str = _LIBRARY) -> DriverDevice:
    """The device with this UUID, at any ordinal. Raises DeviceError."""
    driver = _Driver(library)
    count = c_int()
    driver.call("cuDeviceGetCount", ctypes.byref(count))
    for ordinal in range(count.value):
        device, found = _DEVICE(), _Uuid()
        driver.call("cuDeviceGet", ctypes.byref(device), ordinal)
        driver.call("cuDeviceGetUuid_v2", ctypes.byref(found), device)
        if bytes(found.bytes) == uuid:
            return DriverDevice(ordinal, library)
    raise DeviceError(f"this process does not see the backend's GPU; it sees {count.value} others")
