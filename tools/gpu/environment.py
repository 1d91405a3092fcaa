"""Describes the machine, the versions and the commit, and tells whether the GPU answers. Reads only."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys

from penstock.tools.gpu.items import Item
from penstock.tools.gpu.results import Results

_PACKAGES = ("torch", "cupy-cuda12x", "cupy-cuda13x", "numpy", "safetensors", "transformers", "triton")
_FIELDS = ("driver_version", "clocks.max.sm", "clocks.max.mem", "power.limit")


def describe_environment(commit: str = "") -> dict[str, str]:
    """Software versions, the GPU's name and limits, and the commit (from git if empty). Does not use the GPU."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    name, *values = _output("nvidia-smi", f"--query-gpu=name,{','.join(_FIELDS)}", "--format=csv,noheader").split(", ")
    versions |= {"gpu": name} | dict(zip(_FIELDS, values, strict=False))
    versions["commit"] = commit or _output("git", "describe", "--always", "--dirty") or "unknown"
    return versions


def run(results: Results, _item: Item) -> None:
    import torch

    if not torch.cuda.is_available():
        results.check("gpu", False, "torch finds no CUDA device")
        return
    properties = torch.cuda.get_device_properties(0)
    capability = (properties.major, properties.minor)
    results.fact("gpu.multiprocessors", properties.multi_processor_count, "", f"CUDA {torch.version.cuda} in torch")
    results.fact("gpu.memory", properties.total_memory / 2**30, "GiB", f"{properties.L2_cache_size >> 20} MiB of L2")
    results.check("gpu.capability", capability >= (8, 0), "8.0 is the minimum", "{}.{}".format(*capability))


def _output(*argv: str) -> str:
    """The first line of a command's output; "" if the command is missing, fails or takes more than 10 s."""
    path = shutil.which(argv[0])
    if path is None:
        return ""
    try:
        done = subprocess.run([path, *argv[1:]], capture_output=True, text=True, check=False, timeout=10)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""


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
