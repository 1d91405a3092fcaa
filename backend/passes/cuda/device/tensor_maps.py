"""Encodes `TensorMap` as the driver's CUtensorMap, which the copy engine of sm_90 and later reads (TMA).

Constants: cuda.h, CUDA 12 and 13. The driver copies a map with the launch's other arguments.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int, c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

from penstock.backend.passes.cuda.device.launcher import BOX_COLUMNS

if TYPE_CHECKING:
    from penstock.backend.passes.cuda.device.launcher import TensorMap

MAP_BYTES, _ALIGNMENT = 128, 64
_UINT16, _SWIZZLE_128B, _PROMOTE_TO_256B = 1, 3, 3
_NO_INTERLEAVE = _FILL_WITH_ZEROS = 0

EncodedMap = ctypes.Array[ctypes.c_uint64]
"""The 128 bytes of a map, as a parameter of a launch."""


class MapEncoder:
    """The driver's cuTensorMapEncodeTiled. Maps are kept: each layer's cache has the same map at every launch."""

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
