"""CupyLauncher calls CuPy correctly; tested without CuPy, with a fake that has the few names that it uses."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backend.errors import StartupError
from penstock.backend.forward_pass import PassOptions
from penstock.backend.model_names import DEMO_MODEL_DIR
from penstock.backend.passes.cuda.device import cupy_launcher
from penstock.backend.passes.cuda.device.cubin_cache import cubin_name
from penstock.backend.passes.cuda.device.cuda_device import CudaDevice
from penstock.backend.passes.cuda.device.cupy_launcher import CupyLauncher, LoadedKernel
from penstock.backend.passes.cuda.device.driver_launch import LaunchRefused
from penstock.backend.passes.cuda.device.launcher import Kernel, KernelFailed
from penstock.backend.passes.decoder.forward_pass import DecoderPass
from penstock.process.cache_directory import CUBINS_VARIABLE
from tests.backend.passes.cuda.device.called_kernels import call_kernels

KERNEL = Kernel("rows/norms.cu", "add_rms_norm", (("ACT", 1),), num_threads=256, shared_bytes=70_000)
GATES = [Kernel("rows/activations.cu", entry, (("ACT", 1),), num_threads=128) for entry in ("silu_mul", "gelu_mul")]
TENSOR = torch.zeros(4)


class Fault(Exception):
    """An error of the driver, the runtime or the compiler."""


class Function:
    """A loaded kernel that records its launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.fault: Exception | None = None

    def __call__(self, *arguments: Any) -> None:
        if self.fault is not None:
            raise self.fault
        self.launches.append(arguments)


class FakeCupy:
    def __init__(self) -> None:
        self.function = Function()
        self.modules: list[dict[str, Any]] = []
        self.raws: dict[str, Any] = {}
        self.compile_fault: Exception | None = None
        self.devices: list[int] = []
        self.cuda = SimpleNamespace(
            Device=lambda index: SimpleNamespace(use=lambda: self.devices.append(index), compute_capability="90"),
            compiler=SimpleNamespace(CompileException=Fault),
            driver=SimpleNamespace(CUDADriverError=Fault),
            runtime=SimpleNamespace(CUDARuntimeError=Fault),
        )

    def RawModule(self, **options: Any) -> Any:  # noqa: N802 - CuPy's name
        self.modules.append(options)
        if self.compile_fault is not None:
            raise self.compile_fault
        return SimpleNamespace(get_function=self.get_function)

    def get_function(self, entry: str) -> Any:
        raw = SimpleNamespace(
            kernel=self.function, max_dynamic_shared_size_bytes=48 << 10, num_regs=40, local_size_bytes=8
        )
        return self.raws.setdefault(entry, raw)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch, cubins: Path) -> FakeCupy:
    return install(monkeypatch, FakeCupy())


@pytest.fixture
def cubins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of brought cubins, with one for every module that these tests load."""
    directory = tmp_path / "brought"
    directory.mkdir()
    monkeypatch.setenv(CUBINS_VARIABLE, str(directory))
    for kernel in (KERNEL, GATES[0]):
        (directory / cubin_name([kernel], "sm_90a")).write_bytes(b"machine code")
    return directory


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeCupy) -> FakeCupy:
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _device: 77, raising=False)
    call_kernels(monkeypatch)
    return fake


def test_a_kernel_is_loaded_by_path_and_may_use_all_shared_memory(cupy: FakeCupy, cubins: Path) -> None:
    launcher = CupyLauncher(3)
    launcher.prepare([KERNEL, KERNEL])
    assert cupy.modules == [{"path": str(cubins / cubin_name([KERNEL], "sm_90a"))}]
    assert cupy.raws["add_rms_norm"].max_dynamic_shared_size_bytes == 70_000
    assert cupy.raws["add_rms_norm"].preferred_shared_memory_carveout == 100
    assert set(cupy.devices) == {3}
    assert launcher.resources == {KERNEL: LoadedKernel(registers=40, local_bytes=8)}
    assert launcher.cubins.num_compiled == 0


def test_kernels_of_one_source_with_the_same_macros_are_one_module(cupy: FakeCupy) -> None:
    launcher = CupyLauncher(0)
    launcher.prepare([KERNEL, *GATES, *GATES])
    assert len(cupy.modules) == 2
    assert set(cupy.raws) == {"add_rms_norm", "silu_mul", "gelu_mul"}
    launcher.prepare(GATES)
    assert len(cupy.modules) == 2


def test_a_function_allows_the_most_shared_memory_of_its_kernels(cupy: FakeCupy) -> None:
    launcher = CupyLauncher(0)
    for shared_bytes in (60_000, 80_000, 50_000):
        launcher.prepare([replace(KERNEL, shared_bytes=shared_bytes)])
    assert cupy.raws["add_rms_norm"].max_dynamic_shared_size_bytes == 80_000


def test_tensors_are_passed_as_addresses_and_scalars_unchanged_in_torchs_stream(cupy: FakeCupy) -> None:
    launcher = CupyLauncher(0)
    launcher.prepare([KERNEL])
    for _ in range(2):
        launcher.launch(KERNEL, (5, 2, 1), TENSOR, np.int32(7), np.float32(0.5))
    grid, block, arguments, shared_bytes, stream = cupy.function.launches[1]
    assert (grid, block, shared_bytes) == ((5, 2, 1), (256,), 70_000)
    assert arguments == (TENSOR.data_ptr(), 7, 0.5)
    assert [type(argument) for argument in arguments] == [int, np.int32, np.float32]
    assert stream == 77
    assert str(launcher.last_launch) == "add_rms_norm[ACT=1] (5, 2, 1)"


def test_an_empty_grid_launches_nothing(cupy: FakeCupy) -> None:
    launcher = CupyLauncher(0)
    launcher.prepare([KERNEL])
    launcher.launch(KERNEL, (0, 4, 1), TENSOR)
    assert cupy.function.launches == []


def test_a_broken_cupy_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch, cupy: FakeCupy) -> None:
    def refuse(_index: int) -> None:
        raise RuntimeError("cudaErrorInsufficientDriver:\nthe driver is too old")

    monkeypatch.setattr(cupy.cuda, "Device", refuse)
    with pytest.raises(KernelFailed, match=r"^CuPy does not work: cudaErrorInsufficientDriver: the driver is too"):
        CupyLauncher(0)
    monkeypatch.setattr(CudaDevice, "__init__", lambda _self, index: CupyLauncher(index) and None)
    with pytest.raises(StartupError, match=r"^GPU 1 cannot be used: CuPy does not work: cudaError.* is too old$"):
        DecoderPass.load(DEMO_MODEL_DIR, PassOptions(device="cuda:1"))
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(KernelFailed, match=r"^CuPy does not work: import of cupy halted"):
        CupyLauncher(0)


class UnwritableHome(MetaPathFinder):
    """Finds a CuPy that fails at import, because it cannot create its cache directory."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "cupy":
            raise PermissionError(13, "Permission denied", "/.cupy")


def test_a_cupy_without_a_cache_directory_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(sys, "meta_path", [UnwritableHome(), *sys.meta_path])
    with pytest.raises(KernelFailed, match=r"^CuPy does not work: \[Errno 13\] Permission denied: '/.cupy'$"):
        CupyLauncher(0)


@pytest.mark.parametrize("fault", [OSError(28, "No space left"), RuntimeError("invalid device context")], ids=str)
def test_errors_while_loading_become_kernel_failed(cupy: FakeCupy, fault: Exception) -> None:
    cupy.compile_fault = fault
    with pytest.raises(
        KernelFailed, match=rf"^add_rms_norm\[ACT=1\] of rows/norms.cu cannot .*: {re.escape(str(fault))}$"
    ):
        CupyLauncher(0).prepare([KERNEL])


def test_a_failed_launch_names_its_kernel(cupy: FakeCupy) -> None:
    launcher = CupyLauncher(0)
    with pytest.raises(KernelFailed, match=r"add_rms_norm\[ACT=1\] was launched before it was prepared"):
        launcher.launch(KERNEL, (1, 1, 1), TENSOR)
    launcher.prepare([KERNEL])
    cupy.function.fault = LaunchRefused("CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(KernelFailed, match=r"add_rms_norm\[ACT=1\] cannot be launched with grid \(9, 1, 1\): CUDA_ERR"):
        launcher.launch(KERNEL, (9, 1, 1), TENSOR)
    cupy.compile_fault = Fault("line 3: no such thing")
    with pytest.raises(KernelFailed, match=r"of rows/norms.cu cannot be loaded: line 3"):
        CupyLauncher(0).prepare([KERNEL])


def test_a_driver_without_such_launches_is_reported(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise LaunchRefused("no usable CUDA driver: undefined symbol: cuLaunchKernelEx")

    monkeypatch.setattr(cupy_launcher, "Driver", refuse)
    with pytest.raises(KernelFailed, match=r"^no usable CUDA driver: undefined symbol: cuLaunchKernelEx$"):
        CupyLauncher(0).prepare([KERNEL])
    assert not cupy.modules
