"""The GPU: its driver, the match of torch, CuPy and CUDA, and its free memory.

The driver must be new enough for CUDA's major version; within a major version any driver works.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.backend.errors import StartupError
from penstock.backend.kv_cache.budget.memory import MemoryInfo, cuda_memory
from penstock.backend.passes.cuda.device.device_choice import Gpu, choose_device, find_gpus, why_no_gpu
from penstock.commands.doctor.finding import Finding, Level
from penstock.process.options import format_size

_LEAST_DRIVER = {11: "450", 12: "525", 13: "580"}
"""By CUDA's major version."""
_NEWEST_CUDA = max(_LEAST_DRIVER)
_CUPY = re.compile(r"cupy(?:-cuda(\d+)x)?")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class CudaVersions:
    """Installed versions. A version of CUDA is (major, minor)."""

    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver supports; None without a driver."""
    driver: str = ""
    """The driver's own version, such as 580.65.06; empty if the system does not report it."""
    torch: str = ""
    torch_cuda: tuple[int, int] | None = None
    """CUDA version of torch's build; None if it is for the CPU."""
    cupy: Mapping[str, str] = field(default_factory=dict)
    """Versions of CuPy by the name of their package, such as cupy-cuda13x."""


def read_cuda_versions(driver_file: Path = _DRIVER_FILE) -> CudaVersions:
    import torch  # slow to import

    names = {str(found.metadata["Name"]).lower(): found.version for found in importlib.metadata.distributions()}
    return CudaVersions(
        _driver_cuda(),
        _driver_version(driver_file),
        torch.__version__,
        _pair(torch.version.cuda),
        {name: version for name, version in sorted(names.items()) if _CUPY.fullmatch(name)},
    )


def examine_cuda(gpu: str, found: CudaVersions) -> Iterator[Finding]:
    """gpu is an option as in `choose_device`. Yield nothing for a machine without a driver: it has no GPU."""
    if gpu == "none" or found.driver_cuda is None:
        return
    # With auto the CPU computes instead.
    level = Level.WARNING if gpu == "auto" else Level.ERROR
    own = f" {found.driver}" if found.driver else ""
    text = f"version{own}, for CUDA up to {_text(found.driver_cuda)}"
    if found.torch_cuda is not None and found.driver_cuda[0] < found.torch_cuda[0]:
        yield Finding(
            level,
            "NVIDIA driver",
            f"{text}; torch {found.torch} is built for CUDA {_text(found.torch_cuda)}",
            f"install driver {_LEAST_DRIVER.get(found.torch_cuda[0], 'of this CUDA')} or later, or a torch for CUDA "
            f"{found.driver_cuda[0]}",
        )
    else:
        yield Finding(Level.OK, "NVIDIA driver", text)
    if found.torch_cuda is None:
        major = min(found.driver_cuda[0], _NEWEST_CUDA)
        remedy = f"install torch for CUDA {major}, or give --gpu none"
        yield Finding(level, "torch's CUDA", f"none: torch {found.torch} is built for the CPU only", remedy)
    else:
        yield Finding(Level.OK, "torch's CUDA", f"{_text(found.torch_cuda)}, of torch {found.torch}")
        yield cupy(found.cupy, found.torch_cuda[0], level)


def cupy(packages: Mapping[str, str], torch_major: int, level_if_missing: Level) -> Finding:
    """packages as in `CudaVersions`."""
    subject, right = "CuPy", f"cupy-cuda{torch_major}x"
    install = f"pip install {right}"
    text = ", ".join(f"{name} {version}" for name, version in packages.items())
    if not packages:
        return Finding(level_if_missing, subject, "not installed, so no kernel of the GPU can be compiled", install)
    if len(packages) > 1:
        remedy = f"pip uninstall {' '.join(packages)}, then {install}"
        return Finding(Level.ERROR, subject, f"several packages write into one folder: {text}", remedy)
    major = _cupy_major(next(iter(packages)))
    if major is not None and major != torch_major:
        return Finding(
            Level.ERROR,
            subject,
            f"{text} is for CUDA {major}, and torch for CUDA {torch_major}, which brings no compiler for CUDA {major}",
            f"pip uninstall {next(iter(packages))}, then {install}",
        )
    return Finding(Level.OK, subject, f"{text}, for {'CUDA as built here' if major is None else 'the CUDA of torch'}")


def _cupy_major(name: str) -> int | None:
    """None for a CuPy that was built on this machine, whose package has no CUDA version in its name."""
    found = _CUPY.fullmatch(name)
    return int(found[1]) if found and found[1] else None


def _driver_cuda() -> tuple[int, int] | None:
    version = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return None  # the finding about the GPU has the reason
    return version.value // 1000, version.value % 1000 // 10


def _driver_version(file: Path) -> str:
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", file.read_text(encoding="utf-8"))
    except OSError:
        return ""
    return found[1] if found else ""


def _pair(version: str | None) -> tuple[int, int] | None:
    if version is None:
        return None
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def examine_gpu(
    gpu: str,
    find: Callable[[], list[Gpu]] = find_gpus,
    memory_of: Callable[[int], MemoryInfo] = cuda_memory,
) -> Iterator[Finding]:
    """Examine the GPU.

    gpu is an option as in `choose_device`. A machine without a GPU is fine, unless the option names one.
    """
    if gpu == "none":
        yield Finding(Level.OK, "GPU", "not asked for; the CPU computes")
        return
    try:
        device = choose_device(gpu, find)
    except StartupError as error:
        yield Finding(Level.ERROR, "GPU", str(error), "choose a GPU that is here, or --gpu none")
        return
    if device == "cpu":
        remedy = "nothing, if the CPU is what you want"
        yield Finding(Level.NOTE, "GPU", f"the CPU computes: {why_no_gpu(find)}", remedy)
        return
    gpus = find()
    index = int(device.removeprefix("cuda:"))
    chosen = next(each for each in gpus if each.index == index)
    major, minor = chosen.capability
    yield Finding(Level.OK, "GPU", f"{chosen}, compute capability {major}.{minor}, of {len(gpus)} found")
    try:
        found = memory_of(index)
    except StartupError as error:
        yield Finding(
            Level.ERROR, "GPU memory", str(error), "end the programs that use the GPU (nvidia-smi lists them)"
        )
        return
    text = f"{format_size(found.free_bytes)} of {format_size(found.total_bytes)} are free"
    if found.free_bytes < found.total_bytes / 2:
        remedy = "nvidia-smi lists the programs that hold the rest; --kv-budget auto takes what is free"
        yield Finding(Level.WARNING, "GPU memory", text, remedy)
    else:
        yield Finding(Level.OK, "GPU memory", text)
