"""The driver's launch with attributes, with a stub library that needs no GPU."""

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

from penstock.backend.passes.decoder.cuda.device.dependent_launch import (
    DependentLauncher,
    LaunchAttribute,
    LaunchConfig,
    LaunchRefused,
)

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


def launch(library: str, arguments: Sequence[object] = ARGUMENTS) -> None:
    DependentLauncher(library).launch(0xF00, (7, 2, 1), 256, 98304, 77, arguments)


def test_the_driver_receives_the_launch_its_attribute_and_every_argument(library: str) -> None:
    launch(library)
    recorded = Recorded.in_dll(ctypes.CDLL(library), "recorded")
    assert (list(recorded.grid), list(recorded.block), recorded.shared_bytes) == ([7, 2, 1], [256, 1, 1], 98304)
    assert (recorded.num_attributes, recorded.attribute, recorded.is_allowed) == (1, 6, 1)
    assert (recorded.stream, recorded.function) == (77, 0xF00)
    assert (recorded.pointer, recorded.integer, recorded.wide, recorded.number) == ARGUMENTS


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
        DependentLauncher(ctypes.util.find_library("m") or "libm.so.6")
    with pytest.raises(LaunchRefused, match=r"^no usable CUDA driver: .*absent"):
        DependentLauncher(str(tmp_path / "absent.so"))
