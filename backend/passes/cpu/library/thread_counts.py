"""Sets the number of threads of a pass on the CPU, and how the threads of torch and numpy wait.

Imports neither, because both read these settings when they are imported.

By default torch's OpenMP threads spin while they wait for each other. That is fast on an otherwise idle machine. When
an HTTP process needs a core too, a spinning thread keeps the thread that it waits for from running, and a step takes 4
to 100 times as long. Passive waiting costs a few microseconds per operation. The native kernels have their own threads.
numpy's OpenBLAS starts a thread for each core, and each spins for 2^26 cycles before it sleeps for the first time.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

SPIN_S = 50e-6
"""How long a kernel thread spins for the next operation before it sleeps: longer than the gaps within a step, shorter
than those between steps."""
_LEAST_OPENBLAS_TIMEOUT = "4"
"""The base-2 logarithm of cycles."""
_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def configure_threads() -> None:
    """Set the environment variables that make idle threads sleep; variables already set stay."""
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OMP_NUM_THREADS", str(num_usable_cores()))
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", _LEAST_OPENBLAS_TIMEOUT)


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
