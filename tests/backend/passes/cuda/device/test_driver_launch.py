"""The driver's launch and its tensor maps, with a stub library that needs no GPU."""

from __future__ import annotations

import ctypes
import ctypes.util
import shutil
import subprocess
from ctypes import c_float, c_int, c_longlong, c_size_t, c_uint, c_ulonglong
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from penstock.backend.passes.cuda.device.driver_launch import (
    Driver,
    DriverKernel,
    LaunchAttribute,
    LaunchConfig,
    LaunchRefused,
)
from penstock.backend.passes.cuda.device.launcher import Kernel, TensorMap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.backend.passes.cuda.device.launcher import Argument, Grid

KERNEL = Kernel("rows/norms.cu", "add_rms_norm", (("ACT", 1),), num_threads=256, shared_bytes=98304)
EARLY = replace(KERNEL, is_dependent=True)
LOADED = SimpleNamespace(ptr=0xF00)
ADDRESS = 0x7F0012345678
NUMBERS = (np.int32(-5), np.int64(1 << 40), np.float32(0.5))
ARGUMENTS: tuple[Argument, ...] = (torch.zeros(1), *NUMBERS)
GRID = (7, 2, 1)


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


@pytest.fixture
def stub(library: str) -> Iterator[ctypes.CDLL]:
    """It succeeds, and knows no kernel's parameters."""
    loaded = ctypes.CDLL(library)
    yield loaded
    c_int.in_dll(loaded, "status").value = 0
    c_size_t.in_dll(loaded, "num_parameters").value = 0


def prepare(library: str, kernel: Kernel = KERNEL, capability: tuple[int, int] = (9, 0)) -> DriverKernel:
    return DriverKernel(Driver(library), LOADED, kernel, capability)


def launch(prepared: DriverKernel, arguments: tuple[Argument, ...] = ARGUMENTS, grid: Grid = GRID) -> None:
    prepared.launch(grid, 77, arguments, lambda _: ADDRESS)


@pytest.mark.parametrize(
    ("kernel", "capability", "is_early"),
    [(EARLY, (9, 0), True), (EARLY, (10, 0), True), (EARLY, (8, 9), False), (KERNEL, (9, 0), False)],
)
def test_the_driver_receives_the_launch_its_attribute_and_every_argument(
    stub: ctypes.CDLL, library: str, kernel: Kernel, capability: tuple[int, int], is_early: bool
) -> None:
    prepared = prepare(library, kernel, capability)
    for grid, numbers in ((GRID, NUMBERS), (GRID, (np.int32(7), np.int64(-1), np.float32(-2))), ((1, 1, 3), NUMBERS)):
        launch(prepared, (ARGUMENTS[0], *numbers), grid)
        found = Recorded.in_dll(stub, "recorded")
        assert (tuple(found.grid), list(found.block), found.shared_bytes) == (grid, [256, 1, 1], 98304)
        assert (found.num_attributes, found.stream, found.function) == (is_early, 77, 0xF00)
        assert (found.pointer, found.integer, found.wide, found.number) == (ADDRESS, *numbers)
    if is_early:
        assert (found.attribute, found.is_allowed) == (6, 1)


def test_a_tensor_map_describes_the_rows_and_boxes_and_is_an_argument(stub: ctypes.CDLL, library: str) -> None:
    prepared = prepare(library)
    cache = TensorMap(torch.zeros(96 * 256, dtype=torch.uint8), columns=128, box_rows=32)
    addresses = iter((0x7F0000000000, 0x7F0000000000, 0x7F0000010000))
    num_maps = c_int.in_dll(stub, "num_maps")
    before = num_maps.value
    for num_encoded in (1, 1, 2):  # one for each address
        prepared.launch(GRID, 77, (cache, *NUMBERS), lambda _: next(addresses))
        recorded = Recorded.in_dll(stub, "recorded")
        assert (recorded.pointer, recorded.integer) == (0xA5A5A5A5A5A5A5A5, -5)
        assert num_maps.value == before + num_encoded
    found = RecordedMap.in_dll(stub, "map")
    assert (found.type, found.rank, found.address, list(found.dims), found.stride) == (
        1, 2, 0x7F0000010000, [128, 96], 256
    )  # fmt: skip
    assert (list(found.box), list(found.steps)) == ([64, 32], [1, 1])
    assert (found.interleave, found.swizzle, found.fill, found.misalignment) == (0, 3, 0, 0)
    with pytest.raises(LaunchRefused, match=r"^tensor maps need compute capability 9\.0 or higher$"):
        launch(prepare(library, capability=(8, 9)), (cache, *NUMBERS))


def test_a_refused_map_has_the_drivers_reason_and_is_not_kept(stub: ctypes.CDLL, library: str) -> None:
    driver, status = Driver(library), c_int.in_dll(stub, "status")
    cache = TensorMap(torch.zeros(256, dtype=torch.uint8), columns=64, box_rows=16)
    status.value = 1
    with pytest.raises(LaunchRefused, match=r"^cuTensorMapEncodeTiled: CUDA_ERROR_INVALID_VALUE \(1\)$"):
        driver.encode(cache, 64)
    status.value = 0
    assert driver.encode(cache, 64) % 64 == 0


@pytest.mark.parametrize(
    ("sizes", "is_refused"),
    [((8, 4, 8, 4), False), ((8, 4, 8), True), ((8, 4, 4, 4), True), ((128, 4, 8, 4), True)],
)
def test_arguments_have_the_sizes_of_the_kernels_parameters(
    stub: ctypes.CDLL, library: str, sizes: tuple[int, ...], is_refused: bool
) -> None:
    c_size_t.in_dll(stub, "num_parameters").value = len(sizes)
    (c_size_t * 4).in_dll(stub, "parameter_bytes")[: len(sizes)] = list(sizes)
    prepared = prepare(library)
    if not is_refused:
        launch(prepared)
        return
    for _ in range(2):
        with pytest.raises(LaunchRefused, match=r"^the arguments have \[8, 4, 8, 4\] bytes, but the kernel's param"):
            launch(prepared)


@pytest.mark.parametrize(
    ("arguments", "grid"),
    [
        ((*ARGUMENTS, np.int32(1)), GRID),
        (ARGUMENTS[:3], GRID),
        ((ARGUMENTS[0], ARGUMENTS[0], *NUMBERS[1:]), GRID),  # an address is no int32
        ((ARGUMENTS[0], np.float32(1), *NUMBERS[1:]), GRID),
        ((*ARGUMENTS[:3], TensorMap(torch.zeros(64), 64, 1)), GRID),
        (ARGUMENTS, (1, -1, 1)),
    ],
)
def test_later_launches_have_arguments_of_the_first_ones_types(
    stub: ctypes.CDLL, library: str, arguments: tuple[Argument, ...], grid: tuple[int, int, int]
) -> None:
    prepared = prepare(library)
    launch(prepared)
    Recorded.in_dll(stub, "recorded").integer = 1234
    with pytest.raises(LaunchRefused, match=r"^the arguments or the grid have other types than the kernel's: "):
        launch(prepared, arguments, grid)
    assert Recorded.in_dll(stub, "recorded").integer == 1234


def test_an_argument_of_an_unknown_type_is_refused(library: str) -> None:
    with pytest.raises(LaunchRefused, match=r"^a kernel takes no argument of type int$"):
        launch(prepare(library), (ARGUMENTS[0], 5, *NUMBERS[1:]))  # type: ignore[arg-type]


def test_structures_have_the_sizes_of_the_driver() -> None:
    assert (ctypes.sizeof(LaunchAttribute), LaunchAttribute.is_allowed.offset) == (72, 8)
    assert (ctypes.sizeof(LaunchConfig), LaunchConfig.stream.offset, LaunchConfig.attributes.offset) == (56, 32, 40)


def test_a_refused_launch_has_the_drivers_reason(stub: ctypes.CDLL, library: str) -> None:
    status = c_int.in_dll(stub, "status")
    status.value = 1
    with pytest.raises(LaunchRefused, match=r"^cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE \(1\)$"):
        launch(prepare(library))
    status.value = 9
    with pytest.raises(LaunchRefused, match=r"^cuLaunchKernelEx: unknown error \(9\)$"):
        launch(prepare(library))


def test_a_driver_that_is_missing_or_too_old_is_named(tmp_path: Path) -> None:
    with pytest.raises(LaunchRefused, match=r"^no usable CUDA driver: .*cuLaunchKernelEx"):
        Driver(ctypes.util.find_library("m") or "libm.so.6")
    with pytest.raises(LaunchRefused, match=r"^no usable CUDA driver: .*absent"):
        Driver(str(tmp_path / "absent.so"))
