"""Tensors of the CPU on a GPU for one launch, by a CuPy whose device is the host's memory."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.passes.decoder.cuda.device.launcher import Kernel, KernelFailed
from penstock.tools.gpu_check.cases.ptx import wrapper_kernel
from penstock.tools.gpu_check.devices.mirror_launcher import MirrorLauncher, make_mirrors

KERNEL = Kernel("norms.cu", "add_rms_norm", (("ACT", 0),), num_threads=32)
POISON = 0xAB


class Fault(Exception):
    pass


class HostCupy:
    """Of CuPy what the launcher uses. The kernel adds 1 to the floats of its first argument, count of them."""

    def __init__(self) -> None:
        self.allocations: list[ctypes.Array[ctypes.c_char]] = []
        self.allocator: object = "a pool"
        self.uploads: list[int] = []
        self.seen: list[tuple[Any, ...]] = []
        self.fault: Exception | None = None
        self.cuda = SimpleNamespace(
            Device=lambda _index: SimpleNamespace(use=lambda: None),
            alloc=self.alloc,
            set_allocator=lambda allocator: setattr(self, "allocator", allocator),
            compiler=SimpleNamespace(CompileException=Fault),
            driver=SimpleNamespace(CUDADriverError=Fault),
            runtime=SimpleNamespace(
                CUDARuntimeError=Fault,
                memcpy=self.memcpy,
                deviceSynchronize=lambda: None,
                getDeviceProperties=lambda _index: {"sharedMemPerMultiprocessor": 233_472},
            ),
        )

    def RawModule(self, **_options: Any) -> Any:  # noqa: N802 - CuPy's name
        raw = SimpleNamespace(kernel=self.kernel, max_dynamic_shared_size_bytes=0)
        return SimpleNamespace(get_function=lambda _entry: raw)

    def alloc(self, num_bytes: int) -> Any:
        self.allocations.append(ctypes.create_string_buffer(bytes([POISON]) * num_bytes, num_bytes))
        return SimpleNamespace(ptr=ctypes.addressof(self.allocations[-1]))

    def memcpy(self, target: int, source: int, num_bytes: int, kind: int) -> None:
        if kind == 1:
            self.uploads.append(num_bytes)
        ctypes.memmove(target, source, num_bytes)

    def kernel(self, grid: Any, block: Any, arguments: tuple[Any, ...], shared_bytes: int) -> None:
        if self.fault is not None:
            raise self.fault
        self.seen.append((grid, block, arguments, shared_bytes))
        floats = (ctypes.c_float * int(arguments[-1])).from_address(arguments[0])
        for index in range(len(floats)):
            floats[index] += 1


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> HostCupy:
    fake = HostCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


def test_a_launch_takes_the_tensors_there_and_back(cupy: HostCupy) -> None:
    whole = torch.arange(10.0)
    launcher = MirrorLauncher()
    launcher.launch(KERNEL, (2, 1, 1), whole[3:], np.int32(2))
    assert whole.tolist() == [0, 1, 2, 4, 5, 5, 6, 7, 8, 9]
    ((grid, block, (pointer, count), shared_bytes),) = cupy.seen
    assert (grid, block, count, shared_bytes) == ((2, 1, 1), (32,), 2, 0)
    # From the first element to the last, and no byte more.
    (allocation,) = cupy.allocations
    assert len(allocation) == 7 * 4
    assert pointer == ctypes.addressof(allocation)
    assert launcher.last_launch == f"{KERNEL} (2, 1, 1)"
    assert launcher.shared_bytes_per_sm == 233_472


def test_tensors_that_overlap_are_one_allocation(cupy: HostCupy) -> None:
    whole, other = torch.zeros(8), torch.zeros(2, dtype=torch.int16)
    MirrorLauncher().launch(KERNEL, (1, 1, 1), whole[2:6], other, whole, whole[:0], np.int32(4))
    assert whole.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert sorted(map(len, cupy.allocations)) == [4, 32]
    ((_, _, (part, small, all_of_it, nothing, _), _),) = cupy.seen
    assert part == all_of_it + 8
    assert small not in range(all_of_it, all_of_it + 32)
    assert nothing == 0


def test_poison_stays_behind_where_a_sanitizer_is_to_see_reads_of_it(cupy: HostCupy) -> None:
    launcher = MirrorLauncher(pooled=False, leaves_poison=True)
    assert cupy.allocator is None
    poisoned, mixed = torch.full((4,), torch.nan), torch.tensor([torch.nan, 1.0])
    launcher.launch(KERNEL, (1, 1, 1), mixed, poisoned, np.int32(0))
    assert cupy.uploads == [8]


def test_a_stride_is_part_of_what_is_mirrored() -> None:
    wide = torch.zeros(3, 10)
    (mirror,) = make_mirrors((wide[:, :4],))
    assert mirror.end - mirror.start == (2 * 10 + 4) * 4


def test_a_fault_names_the_kernel_and_its_grid(cupy: HostCupy) -> None:
    cupy.fault = Fault("an illegal memory access")
    with pytest.raises(KernelFailed, match=r"add_rms_norm\[ACT=0\] \(1, 1, 1\): an illegal memory access"):
        MirrorLauncher().launch(KERNEL, (1, 1, 1), torch.zeros(1), np.int32(1))


def test_an_empty_grid_is_no_launch_and_other_devices_tensors_are_refused(cupy: HostCupy) -> None:
    launcher = MirrorLauncher()
    launcher.launch(KERNEL, (0, 1, 1), torch.zeros(1), np.int32(1))
    assert not cupy.seen
    with pytest.raises(KernelFailed, match="a tensor on meta cannot be mirrored"):
        launcher.launch(KERNEL, (1, 1, 1), torch.zeros(1, device="meta"), np.int32(1))


def test_a_wrappers_kernel_is_in_a_file_of_its_own(cupy: HostCupy) -> None:
    kernel = wrapper_kernel("multiply", half=1)
    assert kernel.source.endswith("cases/ptx_wrappers.cu")
    MirrorLauncher().prepare([kernel])
