"""Launches kernels in ways that CuPy does not support.

They are launches that begin before earlier kernels have ended (programmatic dependent launch), and launches with tensor
maps as arguments. This calls the driver itself, in the current context. Structures and constants: cuda.h, CUDA 12 and
13. A captured launch keeps its attribute and the maps.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_uint, c_void_p
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backend.passes.decoder.cuda.device.tensor_maps import MapEncoder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backend.passes.decoder.cuda.device.launcher import Grid, TensorMap
    from penstock.backend.passes.decoder.cuda.device.tensor_maps import EncodedMap

MIN_COMPUTE_CAPABILITY = (9, 0)
_LIBRARY = "libcuda.so.1"
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_C_TYPES: dict[type, Any] = {
    int: ctypes.c_uint64,
    np.int32: ctypes.c_int32,
    np.int64: ctypes.c_int64,
    np.float32: ctypes.c_float,
}
"""C type of a parameter, by the argument's type; an int is an address."""


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


class LaunchRefused(Exception):
    """The driver is missing, or refused a launch or a tensor map; the message says why."""


class DriverLauncher:
    """The driver's cuLaunchKernelEx."""

    def __init__(self, library: str = _LIBRARY) -> None:
        """Raises LaunchRefused."""
        try:
            driver = ctypes.CDLL(library)
            self._launch, self._error_name = driver.cuLaunchKernelEx, driver.cuGetErrorName
        except (OSError, AttributeError) as error:
            raise LaunchRefused(f"no usable CUDA driver: {error}") from error
        self._launch.argtypes = (POINTER(LaunchConfig), c_void_p, POINTER(c_void_p), POINTER(c_void_p))
        self._error_name.argtypes = (c_int, POINTER(c_char_p))
        try:
            self._maps = MapEncoder(driver)
        except AttributeError as error:
            raise LaunchRefused(f"no usable CUDA driver: {error}") from error
        self._attribute = LaunchAttribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, is_allowed=1)

    def launch(
        self,
        function: int,
        grid: Grid,
        num_threads: int,
        shared_bytes: int,
        stream: int,
        arguments: Sequence[object],
        *,
        is_dependent: bool,
    ) -> None:
        """Launch the driver's function.

        arguments are addresses as int, results of `encode`, or numpy scalars. Raises LaunchRefused.
        """
        values: list[Any] = [
            argument if isinstance(argument, ctypes.Array) else _C_TYPES[type(argument)](argument)
            for argument in arguments
        ]
        addresses = (c_void_p * len(values))(*map(ctypes.addressof, values))
        config = LaunchConfig(
            grid=grid,
            block=(num_threads, 1, 1),
            shared_bytes=shared_bytes,
            stream=stream,
            attributes=ctypes.pointer(self._attribute),
            num_attributes=int(is_dependent),
        )
        self._require("cuLaunchKernelEx", self._launch(ctypes.byref(config), function, addresses, None))

    def encode(self, tensor_map: TensorMap, address: int) -> EncodedMap:
        """Return the map as an argument of `launch`; address is its tensor's, on the device. Raises LaunchRefused."""
        status, encoded = self._maps.encode(tensor_map, address)
        self._require("cuTensorMapEncodeTiled", status)
        return encoded

    def _require(self, function: str, status: int) -> None:
        if status != 0:
            text = c_char_p()
            self._error_name(status, ctypes.byref(text))
            raise LaunchRefused(f"{function}: {(text.value or b'unknown error').decode()} ({status})")
