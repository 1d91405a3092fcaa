"""--gpu names a device, or the error says in one line what is missing."""

from __future__ import annotations

import ctypes
import importlib.util
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock.backend.errors import StartupError
from penstock.backend.main import app
from penstock.backend.passes.cuda.device.device_choice import (
    Gpu,
    choose_device,
    find_gpus,
    planned_device,
    why_no_gpu,
)
from penstock.backend.passes.cuda.device.link_probe import LinkSpeed, measure_link
from tests.backend.passes.cuda.emulated_device import EmulatedDevice

if TYPE_CHECKING:
    from collections.abc import Callable

OLD = Gpu(0, "GPU-11112222-aaaa", "Tesla V100", (7, 0))
NEW = Gpu(1, "GPU-11113333-bbbb", "H200", (9, 0))
NEWER = Gpu(2, "GPU-44445555-cccc", "B200", (10, 0))


def having(*gpus: Gpu) -> Callable[[], list[Gpu]]:
    return lambda: list(gpus)


def having_none() -> list[Gpu]:
    raise StartupError("no NVIDIA driver")


@pytest.mark.parametrize(
    ("gpu", "device"),
    [
        ("none", "cpu"),
        ("auto", "cuda:1"),
        ("1", "cuda:1"),
        ("2", "cuda:2"),
        ("GPU-44445555-cccc", "cuda:2"),
        ("GPU-11113", "cuda:1"),
    ],
)
def test_a_gpu_is_named_by_index_or_uuid_and_auto_takes_the_first_supported_one(gpu: str, device: str) -> None:
    assert choose_device(gpu, having(OLD, NEW, NEWER)) == device


@pytest.mark.parametrize(
    ("gpu", "message"),
    [
        ("first", '--gpu is "first"; write an index such as 0, a UUID such as GPU-1234abcd, "none" or "auto"'),
        ("-1", '--gpu is "-1"'),
        ("3", "--gpu is 3: it names none of this machine's GPUs: 0 GPU-11112222-aaaa (Tesla V100), 1 GPU-"),
        ("GPU-1111", "--gpu is GPU-1111: it names several of this machine's GPUs"),
        ("0", "--gpu is 0: the kernels need compute capability 8.0 or more; GPU 0 (Tesla V100) has 7.0"),
    ],
)
def test_a_missing_or_too_old_gpu_is_reported_in_one_line(gpu: str, message: str) -> None:
    with pytest.raises(StartupError) as caught:
        choose_device(gpu, having(OLD, NEW))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("find", "reason"), [(having_none, "no NVIDIA driver"), (having(OLD), "8.0 or more")])
def test_auto_falls_back_to_the_cpu_and_the_reason_is_known(find: Callable[[], list[Gpu]], reason: str) -> None:
    assert choose_device("auto", find) == "cpu"
    assert reason in why_no_gpu(find)


def test_a_plan_can_name_a_gpu_that_this_machine_lacks() -> None:
    assert planned_device("2", having_none) == "cuda:2"
    assert planned_device("GPU-44", having_none) == "cuda:0"
    assert planned_device("auto", having_none) == "cpu"
    with pytest.raises(StartupError, match='--gpu is "x"'):
        planned_device("x", having_none)


class FakeMachine:
    """The machine that `find_gpus` sees; by default nothing is missing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        properties = SimpleNamespace(major=9, minor=0, uuid="abcd-1", name="H200")
        self.set(ctypes, "CDLL", lambda _name: SimpleNamespace(cuInit=lambda _flags: 0))
        self.set(torch.version, "cuda", "13.0")
        self.set(importlib.util, "find_spec", lambda name: name)
        self.set(torch.cuda, "init", lambda: None)
        self.set(torch.cuda, "device_count", lambda: 1)
        self.set(torch.cuda, "get_device_properties", lambda _index: properties)

    def set(self, owner: Any, name: str, value: Any) -> None:
        self.monkeypatch.setattr(owner, name, value)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    return FakeMachine(monkeypatch)


def test_a_gpu_has_the_uuid_that_nvidia_smi_prints(machine: FakeMachine) -> None:
    assert find_gpus() == [Gpu(0, "GPU-abcd-1", "H200", (9, 0))]


def raises(error: Exception) -> Callable[..., Any]:
    def fail(*_args: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("owner", "name", "value", "message"),
    [
        (ctypes, "CDLL", raises(OSError("no such file")), "no NVIDIA driver (libcuda.so.1 cannot be loaded)"),
        (ctypes, "CDLL", lambda _name: SimpleNamespace(cuInit=lambda _flags: 100), "does not start (cuInit says 100"),
        (torch.version, "cuda", None, "is built for the CPU only: install a build for CUDA"),
        (importlib.util, "find_spec", lambda _name: None, "CuPy is not installed: pip install 'penstock[cuda13]'"),
        (torch.cuda, "init", raises(RuntimeError("driver too old\nmore")), "torch cannot use the GPU: driver too old"),
        (torch.cuda, "device_count", lambda: 0, "shows no GPU (CUDA_VISIBLE_DEVICES may hide it)"),
    ],
)
def test_missing_parts_are_reported_in_one_line(
    machine: FakeMachine, owner: Any, name: str, value: Any, message: str
) -> None:
    machine.set(owner, name, value)
    with pytest.raises(StartupError) as caught:
        find_gpus()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_suggested_extra_matches_torchs_cuda(machine: FakeMachine) -> None:
    machine.set(torch.version, "cuda", "12.8")
    machine.set(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(StartupError, match=r"penstock\[cuda12\]"):
        find_gpus()


def test_a_dry_run_plans_for_a_gpu_that_this_machine_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["--dry-run", "--gpu", "7", "--kv-budget", "2GB", "--kv-dtype", "fp8"])
    assert ended.value.code in (None, 0)
    printed = capsys.readouterr().out
    for row in ("weights", "workspace", "of the workspace, graphs", "KV cache", "fp8"):
        assert row in printed


def test_the_link_is_measured_both_ways() -> None:
    speed = measure_link(EmulatedDevice(), num_bytes=1 << 16)
    assert speed.to_device > 0
    assert speed.to_host > 0
    assert LinkSpeed(2e9, 1e9).copy_s(10**9) == 1.5
    assert str(LinkSpeed(50e9, 45.04e9)) == "50.0 GB/s to the GPU, 45.0 GB/s back"
