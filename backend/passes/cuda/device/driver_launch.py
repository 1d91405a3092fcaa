"""Launches kernels by the driver's cuLaunchKernelEx, in the current context.

A launch may begin before earlier kernels have ended (programmatic dependent launch), and may have tensor maps as
arguments; a captured launch keeps both. Each kernel has memory of its own for what the driver reads during a launch, so
that a launch only writes numbers there: steps launch hundreds of kernels. Structures and constants: cuda.h, CUDA 12 and
13.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np
from torch import Tensor

from penstock.backend.passes.cuda.device.launcher import BOX_COLUMNS, Argument, Grid, Kernel, TensorMap

MAP_BYTES, _ALIGNMENT = 128, 64
_UINT16, _SWIZZLE_128B, _PROMOTE_TO_256B = 1, 3, 3
_NO_INTERLEAVE = _FILL_WITH_ZEROS = 0

EncodedMap = ctypes.Array[ctypes.c_uint64]
"""The 128 bytes of a map, as a parameter of a launch."""


class MapEncoder:
    """The driver's cuTensorMapEncodeTiled: makes of a `TensorMap` the CUtensorMap that the copy engine of sm_90 and
    later reads (TMA). Maps are kept: each layer's cache has the same map at every launch."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        """Raises AttributeError if the driver is too old."""
        self._encode: Any = driver.cuTensorMapEncodeTiled
        self._encode.argtypes = (
            c_void_p, c_int, c_uint32, c_void_p, POINTER(c_uint64), POINTER(c_uint64), POINTER(c_uint32),
            POINTER(c_uint32), c_int, c_int, c_int, c_int,
        )  # fmt: skip
        self._kept: dict[tuple[int, int, int, int], EncodedMap] = {}

    def encode(self, tensor_map: TensorMap, address: int) -> tuple[int, EncodedMap]:
        """Return the driver's status, 0 for success, and the map. address is the tensor's, on the device."""
        key = address, tensor_map.rows, tensor_map.columns, tensor_map.box_rows
        if key in self._kept:
            return 0, self._kept[key]
        memory = ctypes.create_string_buffer(MAP_BYTES + _ALIGNMENT)
        offset = -ctypes.addressof(memory) % _ALIGNMENT
        encoded = (c_uint64 * (MAP_BYTES // 8)).from_buffer(memory, offset)
        status = self._encode(
            ctypes.addressof(encoded),
            _UINT16,
            2,
            address,
            (c_uint64 * 2)(tensor_map.columns, tensor_map.rows),
            (c_uint64 * 1)(2 * tensor_map.columns),
            (c_uint32 * 2)(BOX_COLUMNS, tensor_map.box_rows),
            (c_uint32 * 2)(1, 1),
            _NO_INTERLEAVE,
            _SWIZZLE_128B,
            _PROMOTE_TO_256B,
            _FILL_WITH_ZEROS,
        )
        if status == 0:
            self._kept[key] = encoded
        return int(status), encoded


EARLY_CAPABILITY = (9, 0)
"""The first compute capability with dependent launches and tensor maps."""
_LIBRARY = "libcuda.so.1"
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_ADDRESS_FORMAT = "Q"
_FORMATS: dict[type, str] = {np.int32: "i", np.int64: "q", np.float32: "f"}
"""The parameter's C type in the terms of struct, by the argument's type."""


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, with the one value that is used from a union of 64 bytes."""

    _fields_ = (("id", c_int), ("padding", c_int), ("is_allowed", c_int), ("rest", ctypes.c_ubyte * 60))


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(LaunchAttribute)),
        ("num_attributes", c_uint),
    )


_WRITE_GRID = struct.Struct("@3I").pack_into


class LaunchRefused(Exception):
    """The driver is missing, or refused a launch or a tensor map, or an argument is of the wrong type; the message says
    why."""


class Driver:
    """The driver's functions for launches."""

    def __init__(self, library: str = _LIBRARY) -> None:
        """Raises LaunchRefused."""
        try:
            driver = ctypes.CDLL(library)
            # Without argtypes: `DriverKernel` has objects of ctypes, and conversions take longer than the call.
            self.launch: Any = driver.cuLaunchKernelEx
            self._error_name = driver.cuGetErrorName
            self._maps = MapEncoder(driver)
        except (OSError, AttributeError) as error:
            raise LaunchRefused(f"no usable CUDA driver: {error}") from error
        self._parameter_info: Any = getattr(driver, "cuFuncGetParamInfo", None)
        """None before CUDA 12.4."""
        self._error_name.argtypes = (c_int, POINTER(c_char_p))
        if self._parameter_info is not None:
            self._parameter_info.argtypes = (c_void_p, c_size_t, POINTER(c_size_t), POINTER(c_size_t))

    def encode(self, tensor_map: TensorMap, address: int) -> int:
        """Return the address of the encoded map, which lives as long as this object; address is its tensor's, on the
        device. Raises LaunchRefused."""
        status, encoded = self._maps.encode(tensor_map, address)
        if status:
            raise self.refusal("cuTensorMapEncodeTiled", status)
        return ctypes.addressof(encoded)

    def parameter_bytes(self, function: int) -> list[int] | None:
        """Return the sizes of a loaded kernel's parameters; None if the driver does not know them."""
        if self._parameter_info is None:
            return None
        sizes: list[int] = []
        offset, size = c_size_t(), c_size_t()
        while self._parameter_info(function, len(sizes), ctypes.byref(offset), ctypes.byref(size)) == 0:
            sizes.append(size.value)
        return sizes or None

    def refusal(self, function: str, status: int) -> LaunchRefused:
        text = c_char_p()
        self._error_name(status, ctypes.byref(text))
        return LaunchRefused(f"{function}: {(text.value or b'unknown error').decode()} ({status})")


class DriverKernel:
    """A loaded kernel, and the memory that the driver reads during its launches. One thread at a time launches it."""

    __slots__ = (
        "_addresses", "_attribute", "_config", "_config_argument", "_driver", "_function", "_grid", "_has_maps",
        "_launch", "_loaded", "_maps", "_num_first", "_parameter_bytes", "_values", "_write",
    )  # fmt: skip

    def __init__(self, driver: Driver, loaded: Any, kernel: Kernel, capability: tuple[int, int]) -> None:
        """loaded is CuPy's function, whose `ptr` is the driver's handle; its last reference unloads it. capability is
        the device's."""
        self._driver = driver
        self._launch = driver.launch
        self._loaded = loaded
        self._function = c_void_p(loaded.ptr)
        self._has_maps = capability >= EARLY_CAPABILITY
        self._attribute = LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, is_allowed=1)
        self._config = LaunchConfig(
            block=(kernel.num_threads, 1, 1),
            shared_bytes=kernel.shared_bytes,
            attributes=ctypes.pointer(self._attribute),
            num_attributes=int(kernel.is_dependent and capability >= EARLY_CAPABILITY),
        )
        self._config_argument = ctypes.byref(self._config)
        self._grid: Grid | None = None
        """The grid in _config."""
        self._parameter_bytes = driver.parameter_bytes(loaded.ptr)
        self._write: Callable[..., None] | None = None
        """Writes an argument list to _values; made by the first launch."""
        self._values: Any = None
        self._addresses: Any = None
        """The address of each parameter's value."""
        self._maps: tuple[int, ...] = ()
        """Which parameters are tensor maps; their values lie elsewhere."""
        self._num_first: int | None = None
        """The number of tensors, if all come first and no map is among them; such lists are converted faster."""

    def launch(
        self, grid: Grid, stream: int, arguments: tuple[Argument, ...], address_of: Callable[[Tensor], int]
    ) -> None:
        """All launches have arguments of the same types. address_of returns a tensor's address on the device. Raises
        LaunchRefused."""
        write = self._write or self._take_types(arguments)
        config, first = self._config, self._num_first
        try:
            if first is not None:
                tensors: Any = arguments[:first]
                write(self._values, 0, *map(address_of, tensors), *arguments[first:])
            else:
                write(self._values, 0, *self._addressed(arguments, address_of))
            if grid != self._grid:
                _WRITE_GRID(config, 0, *grid)
                self._grid = grid
        except (struct.error, TypeError) as error:
            raise LaunchRefused(f"the arguments or the grid have other types than the kernel's: {error}") from error
        config.stream = stream
        status = self._launch(self._config_argument, self._function, self._addresses, None)
        if status:
            raise self._driver.refusal("cuLaunchKernelEx", status)

    def _addressed(self, arguments: tuple[Argument, ...], address_of: Callable[[Tensor], int]) -> list[Any]:
        """Return the arguments with addresses for tensors, and the encoded maps as parameters."""
        values: list[Any] = [address_of(each) if isinstance(each, Tensor) else each for each in arguments]
        for index in self._maps:
            tensor_map = values[index]
            values[index] = self._addresses[index] = self._driver.encode(tensor_map, address_of(tensor_map.tensor))
        return values

    def _take_types(self, arguments: tuple[Argument, ...]) -> Callable[..., None]:
        """Lay out the memory for arguments of these types. Raises LaunchRefused if the kernel's have other sizes."""
        formats = [_format_of(each) for each in arguments]
        maps = tuple(index for index, each in enumerate(arguments) if isinstance(each, TensorMap))
        if maps and not self._has_maps:
            raise LaunchRefused("tensor maps need compute capability 9.0 or higher")
        given = [MAP_BYTES if index in maps else struct.calcsize(each) for index, each in enumerate(formats)]
        if self._parameter_bytes not in (None, given):
            expected = self._parameter_bytes
            raise LaunchRefused(f"the arguments have {given} bytes, but the kernel's parameters {expected}")
        layout = struct.Struct("@" + "".join(formats))
        self._values = ctypes.create_string_buffer(max(layout.size, 1))
        start, addresses = ctypes.addressof(self._values), []
        for index, each in enumerate(formats):
            end = struct.calcsize("@" + "".join(formats[: index + 1]))  # values are aligned as in C
            addresses.append(start + end - struct.calcsize(each))
        self._addresses = (c_void_p * max(len(addresses), 1))(*addresses)
        self._maps = maps
        num_tensors = sum(isinstance(each, Tensor) for each in arguments)
        if not maps and all(isinstance(each, Tensor) for each in arguments[:num_tensors]):
            self._num_first = num_tensors
        self._write = layout.pack_into
        return self._write


def _format_of(argument: Argument) -> str:
    if isinstance(argument, Tensor | TensorMap):
        return _ADDRESS_FORMAT
    found = _FORMATS.get(type(argument))
    if found is None:
        raise LaunchRefused(f"a kernel takes no argument of type {type(argument).__name__}")
    return found
