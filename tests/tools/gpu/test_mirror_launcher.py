"""`MirrorLauncher`, tested with a fake CuPy whose device memory is host memory."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.passes.cuda.device.launcher import Kernel, KernelFailed
from penstock.tools.gpu.cases.ptx_wrappers import wrapper_kernel
from penstock.tools.gpu.devices.mirror_launcher import MirrorLauncher, make_mirrors
from tests.backend.passes.cuda.device.called_kernels import call_kernels

KERNEL = Kernel("rows/norms.cu", "add_rms_norm", (("ACT", 0),), num_threads=32)
POISON = 0xAB


class Fault(Exception):
    pass


class HostCupy:
    """The part of CuPy that the launcher uses. The kernel adds 1 to the first `count` floats of its first argument."""

    def __init__(self) -> None:
        self.allocations: list[ctypes.Array[ctypes.c_char]] = []
        self.allocator: object = "a pool"
        self.uploads: list[int] = []
        self.seen: list[tuple[Any, ...]] = []
        self.fault: Exception | None = None
        self.cuda = SimpleNamespace(
            Device=lambda _index: SimpleNamespace(use=lambda: None, compute_capability="90"),
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
        raw = SimpleNamespace(kernel=self.kernel, max_dynamic_shared_size_bytes=0, num_regs=40, local_size_bytes=0)
        return SimpleNamespace(get_function=lambda _entry: raw)

    def alloc(self, num_bytes: int) -> Any:
        self.allocations.append(ctypes.create_string_buffer(bytes([POISON]) * num_bytes, num_bytes))
        return SimpleNamespace(ptr=ctypes.addressof(self.allocations[-1]))

    def memcpy(self, target: int, source: int, num_bytes: int, kind: int) -> None:
        if kind == 1:
            self.uploads.append(num_bytes)
        ctypes.memmove(target, source, num_bytes)

    def kernel(self, grid: Any, block: Any, arguments: tuple[Any, ...], shared_bytes: int, stream: Any) -> None:
        if self.fault is not None:
            raise self.fault
        assert stream == 0, "not the default stream"
        self.seen.append((grid, block, arguments, shared_bytes))
        floats = (ctypes.c_float * int(arguments[-1])).from_address(arguments[0])
        for index in range(len(floats)):
            floats[index] += 1


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> HostCupy:
    fake = HostCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    call_kernels(monkeypatch)
    return fake


def test_launch_copies_the_tensors_to_the_device_and_back(cupy: HostCupy) -> None:
    whole = torch.arange(10.0)
    launcher = MirrorLauncher()
    launcher.launch(KERNEL, (2, 1, 1), whole[3:], np.int32(2))
    assert whole.tolist() == [0, 1, 2, 4, 5, 5, 6, 7, 8, 9]
    ((grid, block, (pointer, count), shared_bytes),) = cupy.seen
    assert (grid, block, count, shared_bytes) == ((2, 1, 1), (32,), 2, 0)
    # From the first element to the last, without a byte more.
    (allocation,) = cupy.allocations
    assert len(allocation) == 7 * 4
    assert pointer == ctypes.addressof(allocation)
    assert launcher.last_launch == f"{KERNEL} (2, 1, 1)"
    assert launcher.shared_bytes_per_sm == 233_472


def test_overlapping_tensors_share_an_allocation(cupy: HostCupy) -> None:
    whole, other = torch.zeros(8), torch.zeros(2, dtype=torch.int16)
    MirrorLauncher().launch(KERNEL, (1, 1, 1), whole[2:6], other, whole, whole[:0], np.int32(4))
    assert whole.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert sorted(map(len, cupy.allocations)) == [4, 32]
    ((_, _, (part, small, all_of_it, nothing, _), _),) = cupy.seen
    assert part == all_of_it + 8
    assert small not in range(all_of_it, all_of_it + 32)
    assert nothing == 0


def test_poison_is_not_uploaded_when_a_sanitizer_should_see_reads_of_it(cupy: HostCupy) -> None:
    launcher = MirrorLauncher(pooled=False, leaves_poison=True)
    assert cupy.allocator is None
    poisoned, mixed = torch.full((4,), torch.nan), torch.tensor([torch.nan, 1.0])
    launcher.launch(KERNEL, (1, 1, 1), mixed, poisoned, np.int32(0))
    assert cupy.uploads == [8]


def test_mirror_spans_strided_tensors() -> None:
    wide = torch.zeros(3, 10)
    (mirror,) = make_mirrors((wide[:, :4],))
    assert mirror.end - mirror.start == (2 * 10 + 4) * 4


def test_fault_names_the_kernel_and_its_grid(cupy: HostCupy) -> None:
    cupy.fault = Fault("an illegal memory access")
    with pytest.raises(KernelFailed, match=r"add_rms_norm\[ACT=0\] \(1, 1, 1\): an illegal memory access"):
        MirrorLauncher().launch(KERNEL, (1, 1, 1), torch.zeros(1), np.int32(1))


def test_empty_grid_is_skipped_and_tensors_of_other_devices_are_refused(cupy: HostCupy) -> None:
    launcher = MirrorLauncher()
    launcher.launch(KERNEL, (0, 1, 1), torch.zeros(1), np.int32(1))
    assert not cupy.seen
    with pytest.raises(KernelFailed, match="a tensor on meta cannot be mirrored"):
        launcher.launch(KERNEL, (1, 1, 1), torch.zeros(1, device="meta"), np.int32(1))


def test_wrapper_kernel_has_a_source_file_of_its_own(cupy: HostCupy) -> None:
    kernel = wrapper_kernel("multiply", half=1)
    assert kernel.source.endswith("cases/ptx_wrappers.cu")
    MirrorLauncher().prepare([kernel])
