"""Describes the machine, the software versions and the commit, and tells whether the GPU answers. Reads only."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys

from penstock.tools.gpu.results import Results

_PACKAGES = ("torch", "cupy-cuda12x", "cupy-cuda13x", "numpy", "safetensors", "transformers", "triton")
_NVIDIA_SMI_FIELDS = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "temperature.gpu", "power.limit")


def describe_environment(commit: str = "") -> dict[str, str]:
    """Software versions, the GPU's name and the commit (from git if empty). Does not use the GPU."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["gpu"] = next(iter(_output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()), "")
    versions["commit"] = commit or _output("git", "describe", "--always", "--dirty") or "unknown"
    return versions


def run(results: Results) -> None:
    import torch

    if not torch.cuda.is_available():
        results.check("gpu", False, "torch finds no CUDA device")
        return
    properties = torch.cuda.get_device_properties(0)
    results.fact("gpu.name", properties.name)
    results.fact("gpu.capability", f"{properties.major}.{properties.minor}")
    results.fact("gpu.multiprocessors", properties.multi_processor_count)
    results.fact("gpu.memory", properties.total_memory / 2**30, "GiB")
    results.fact("gpu.l2", properties.L2_cache_size / 2**20, "MiB")
    results.fact("gpu.shared_per_multiprocessor", properties.shared_memory_per_multiprocessor / 1024, "KiB")
    results.fact("cuda.torch", str(torch.version.cuda))
    values = _output("nvidia-smi", f"--query-gpu={','.join(_NVIDIA_SMI_FIELDS)}", "--format=csv,noheader")
    for field, value in zip(_NVIDIA_SMI_FIELDS, values.split(", "), strict=False):
        results.fact(f"nvidia-smi.{field}", value)
    results.check("gpu.capability_is_served", (properties.major, properties.minor) >= (8, 0), "8.0 is the minimum")


def _output(*argv: str) -> str:
    """A command's output; "" if the command is missing, fails or takes more than 10 s."""
    path = shutil.which(argv[0])
    if path is None:
        return ""
    try:
        done = subprocess.run([path, *argv[1:]], capture_output=True, text=True, check=False, timeout=10)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def device_fault() -> str | None:
    """The error that waiting for the GPU raises; None if the GPU answers or this process does not use it."""
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    try:
        if cupy is not None:
            cupy.cuda.runtime.deviceSynchronize()
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception as fault:  # noqa: BLE001 - after any error here the device is lost
        return next(iter(str(fault).splitlines()), type(fault).__name__)
    return None
