"""The driver's launch and its tensor maps, with a stub library that needs no GPU."""

from __future__ import annotations

import ctypes
import ctypes.util
import shutil
import subprocess
from ctypes import c_float, c_int, c_longlong, c_size_t, c_uint, c_ulonglong
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from penstock.backend.passes.decoder.cuda.device.driver_launch import (
    DriverLauncher,
    LaunchAttribute,
    LaunchConfig,
    LaunchRefused,
)
from penstock.backend.passes.decoder.cuda.device.launcher import TensorMap

if TYPE_CHECKING:
    from collections.abc import Sequence

ARGUMENTS = (0x7F0012345678, np.int32(-5), np.int64(1 << 40), np.float32(0.5))


class Recorded(ctypes.Structure):
    _fields_ = (
        *((name, c_uint * 3) for name in ("grid", "block")),
        *((name, c_uint) for name in ("shared_bytes", "num_attributes")),
        *((name, c_int) for name in ("attribute", "is_allowed")),
        *((name, c_size_t) for name in ("stream", "function")),
        ("pointer", c_ulonglong),
        ("integer", c_int),
        ("wide", c_longlong),
        ("number", c_float),
    )


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("stub") / "libcuda-stub.so"
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
    assert compiler is not None, "the stub driver needs a C compiler"
    source = Path(__file__).with_name("stub_launch.c")
    subprocess.run([compiler, "-x", "c", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    return str(path)


class RecordedMap(ctypes.Structure):
    _fields_ = (
        *((name, c_int) for name in ("type", "rank")),
        ("address", c_size_t),
        ("dims", c_ulonglong * 2),
        ("stride", c_ulonglong),
        *((name, c_uint * 2) for name in ("box", "steps")),
        *((name, c_int) for name in ("interleave", "swizzle", "promotion", "fill", "misalignment")),
    )


def launch(library: str, arguments: Sequence[object] = ARGUMENTS, *, is_dependent: bool = True) -> None:
    DriverLauncher(library).launch(0xF00, (7, 2, 1), 256, 98304, 77, arguments, is_dependent=is_dependent)


def test_the_driver_receives_the_launch_its_attribute_and_every_argument(library: str) -> None:
    launch(library)
    recorded = Recorded.in_dll(ctypes.CDLL(library), "recorded")
    assert (list(recorded.grid), list(recorded.block), recorded.shared_bytes) == ([7, 2, 1], [256, 1, 1], 98304)
    assert (recorded.num_attributes, recorded.attribute, recorded.is_allowed) == (1, 6, 1)
    assert (recorded.stream, recorded.function) == (77, 0xF00)
    assert (recorded.pointer, recorded.integer, recorded.wide, recorded.number) == ARGUMENTS


def test_a_tensor_map_describes_the_rows_and_boxes_and_is_an_argument(library: str) -> None:
    driver, stub = DriverLauncher(library), ctypes.CDLL(library)
    cache = TensorMap(torch.zeros(96 * 256, dtype=torch.uint8), columns=128, box_rows=32)
    encoded = driver.encode(cache, 0x7F0000000000)
    found = RecordedMap.in_dll(stub, "map")
    assert (found.type, found.rank, found.address, list(found.dims), found.stride) == (
        1, 2, 0x7F0000000000, [128, 96], 256
    )  # fmt: skip
    assert (list(found.box), list(found.steps)) == ([64, 32], [1, 1])
    assert (found.interleave, found.swizzle, found.fill, found.misalignment) == (0, 3, 0, 0)
    assert bytes(encoded) == b"\xa5" * 128
    driver.launch(1, (1, 1, 1), 384, 0, 0, (encoded, *ARGUMENTS[1:]), is_dependent=False)
    recorded = Recorded.in_dll(stub, "recorded")
    assert (recorded.num_attributes, recorded.pointer, recorded.integer) == (0, 0xA5A5A5A5A5A5A5A5, -5)
    num_maps = c_int.in_dll(stub, "num_maps")
    before = num_maps.value
    assert driver.encode(cache, 0x7F0000000000) is encoded
    assert driver.encode(cache, 0x7F0000010000) is not encoded
    assert num_maps.value == before + 1


def test_a_refused_map_has_the_drivers_reason_and_is_not_kept(library: str) -> None:
    driver, status = DriverLauncher(library), c_int.in_dll(ctypes.CDLL(library), "status")
    cache = TensorMap(torch.zeros(256, dtype=torch.uint8), columns=64, box_rows=16)
    status.value = 1
    try:
        with pytest.raises(LaunchRefused, match=r"^cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE \(1\)$"):
            driver.encode(cache, 64)
    finally:
        status.value = 0
    assert len(driver.encode(cache, 64)) == 16


def test_structures_have_the_sizes_of_the_driver() -> None:
    assert (ctypes.sizeof(LaunchAttribute), LaunchAttribute.is_allowed.offset) == (72, 8)
    assert (ctypes.sizeof(LaunchConfig), LaunchConfig.stream.offset, LaunchConfig.attributes.offset) == (56, 32, 40)


def test_a_refused_launch_has_the_drivers_reason(library: str) -> None:
    status = c_int.in_dll(ctypes.CDLL(library), "status")
    status.value = 1
    try:
        with pytest.raises(LaunchRefused, match=r"^cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE \(1\)$"):
            launch(library)
        status.value = 9
        with pytest.raises(LaunchRefused, match=r"^cuLaunchKernelEx: unknown error \(9\)$"):
            launch(library)
    finally:
        status.value = 0


def test_a_driver_that_is_missing_or_too_old_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchRefused, match=r"^no usable CUDA driver: .*cuLaunchKernelEx"):
        DriverLauncher(ctypes.util.find_library("m") or "libm.so.6")
    with pytest.raises(LaunchRefused, match=r"^no usable CUDA driver: .*absent"):
        DriverLauncher(str(tmp_path / "absent.so"))
