"""Sets the number of threads of a pass on the CPU, and how torch's own threads wait.

Does not import torch, which reads these settings when it is imported.

By default torch's OpenMP threads spin while they wait for each other. That is fast on an otherwise idle machine. When
an HTTP process needs a core too, a spinning thread keeps the thread that it waits for from running, and a step takes 4
to 100 times as long. Passive waiting costs a few microseconds per operation. The native kernels have their own threads.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def configure_torch_threads() -> None:
    """Set the environment variables that make torch's threads sleep while they wait; variables already set stay."""
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OMP_NUM_THREADS", str(num_usable_cores()))


def num_usable_cores(cpu_max: Path = _CGROUP_CPU_MAX) -> int:
    """Number of cores this process may use, at least 1: its CPU affinity, limited by a container's CPU quota and by
    OMP_NUM_THREADS."""
    cores = len(os.sched_getaffinity(0))
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdecimal():
        cores = min(cores, int(wanted))
    try:
        quota, period = cpu_max.read_text().split()
        if quota != "max":
            cores = min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        # Without cgroup v2 there is no quota to read.
        pass
    return max(1, cores)
