"""The CUDA versions of driver, torch and CuPy, from made-up installations."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from penstock.commands.doctor.finding import Finding, Level
from penstock.commands.doctor.gpu import CudaVersions, examine_cuda, read_cuda_versions

if TYPE_CHECKING:
    from pathlib import Path

GOOD = CudaVersions((13, 0), "580.65.06", "2.13.0+cu130", (13, 0), {"cupy-cuda13x": "14.0.1"})


def findings(found: CudaVersions, gpu: str = "0") -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine_cuda(gpu, found)}


def test_versions_that_go_together_are_named() -> None:
    found = findings(GOOD)
    assert {finding.level for finding in found.values()} == {Level.OK}
    assert found["NVIDIA driver"].found == "version 580.65.06, for CUDA up to 13.0"
    assert found["torch's CUDA"].found == "13.0, of torch 2.13.0+cu130"
    assert found["CuPy"].found == "cupy-cuda13x 14.0.1, for the CUDA of torch"


@pytest.mark.parametrize("driver_cuda", [(12, 0), (12, 9), (13, 0)])
def test_driver_of_the_same_or_a_newer_major_version_is_enough(driver_cuda: tuple[int, int]) -> None:
    found = findings(
        replace(GOOD, driver_cuda=driver_cuda, torch_cuda=(12, 8), cupy={"cupy-cuda12x": "14.0.1"}, driver="")
    )
    assert {finding.level for finding in found.values()} == {Level.OK}


@pytest.mark.parametrize(("gpu", "level"), [("0", Level.ERROR), ("auto", Level.WARNING)])
def test_driver_older_than_torchs_cuda_needs_another_driver_or_torch(gpu: str, level: Level) -> None:
    old = findings(replace(GOOD, driver_cuda=(12, 4), driver="550.54.14"), gpu)["NVIDIA driver"]
    assert old.level is level
    assert old.found == "version 550.54.14, for CUDA up to 12.4; torch 2.13.0+cu130 is built for CUDA 13.0"
    assert old.remedy == "install driver 580 or later, or a torch for CUDA 12"


@pytest.mark.parametrize(("gpu", "level"), [("0", Level.ERROR), ("auto", Level.WARNING)])
def test_torch_for_the_cpu_and_missing_cupy_need_a_package(gpu: str, level: Level) -> None:
    torch = findings(replace(GOOD, torch="2.13.0+cpu", torch_cuda=None), gpu)["torch's CUDA"]
    assert (torch.level, torch.remedy) == (level, "install torch for CUDA 13, or give --gpu none")
    missing = findings(replace(GOOD, cupy={}), gpu)["CuPy"]
    assert (missing.level, missing.remedy) == (level, "pip install cupy-cuda13x")


def test_cupy_for_another_cuda_than_torch_is_an_error() -> None:
    other = findings(replace(GOOD, cupy={"cupy-cuda12x": "13.6.0"}), "auto")["CuPy"]
    assert other.level is Level.ERROR
    assert other.found.startswith("cupy-cuda12x 13.6.0 is for CUDA 12, and torch for CUDA 13")
    assert other.remedy == "pip uninstall cupy-cuda12x, then pip install cupy-cuda13x"
    several = findings(replace(GOOD, cupy={"cupy-cuda12x": "13.6.0", "cupy-cuda13x": "14.0.1"}))["CuPy"]
    assert several.level is Level.ERROR
    assert several.remedy == "pip uninstall cupy-cuda12x cupy-cuda13x, then pip install cupy-cuda13x"


def test_cupy_built_on_the_machine_is_taken_for_right() -> None:
    assert findings(replace(GOOD, cupy={"cupy": "14.0.1"}))["CuPy"].level is Level.OK


def test_machine_without_a_driver_or_with_gpu_none_has_no_findings() -> None:
    assert not findings(replace(GOOD, driver_cuda=None))
    assert not findings(GOOD, "none")


def test_installed_versions_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U16)\n"
        "GCC version:  gcc version 13.3.0\n"
    )
    for name in ("cupy_cuda12x", "cupyx_tools"):
        package = tmp_path / f"{name}-1.2.dist-info"
        package.mkdir()
        (package / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: 1.2\n")
    monkeypatch.setattr("torch.version.cuda", "12.8")
    monkeypatch.syspath_prepend(tmp_path)
    found = read_cuda_versions(tmp_path / "version")
    assert (found.driver, found.torch_cuda) == ("580.65.06", (12, 8))
    assert found.cupy["cupy-cuda12x"] == "1.2"
    assert "cupyx-tools" not in found.cupy
    assert found.torch.startswith(importlib.metadata.version("torch").partition("+")[0])
    assert read_cuda_versions(tmp_path / "missing").driver == ""
