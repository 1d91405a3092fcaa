"""The machine on which a figure was measured. No figure is printed without it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@dataclass(frozen=True, slots=True)
class MachineDescription:
    cpu: str
    cores: int
    """Cores that this process may use."""
    memory_gib: float
    gpu: str
    kernel: str
    python: str
    penstock: str
    torch: str
    date: str

    def describe(self) -> str:
        gpu = f", {self.gpu}" if self.gpu else ""
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory_gib:.0f} GiB{gpu}; Linux {self.kernel}, "
            f"Python {self.python}, torch {self.torch}, penstock {self.penstock}; {self.date}"
        )


def this_machine() -> MachineDescription:
    return MachineDescription(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        gpu=_gpu_model(),
        kernel=platform.release(),
        python=platform.python_version(),
        penstock=_version("penstock"),
        torch=_version("torch"),
        date=datetime.now(UTC).date().isoformat(),
    )


def _version(package: str) -> str:
    """Read the package metadata, so that torch need not be imported."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model's name; for ARM, where Linux has none, the numbers of its designer and part."""
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    numbers = [f"{name} {fields[name]}" for name in ("CPU implementer", "CPU part") if name in fields]
    return fields.get("model name") or ", ".join((platform.machine(), *numbers))


def _gpu_model() -> str:
    """Return the models as the NVIDIA driver names them; empty without a driver."""
    models = []
    for information in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name == "Model":
                models.append(value.strip())
    return " + ".join(models)
