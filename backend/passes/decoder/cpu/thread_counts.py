"""How many threads a pass on the CPU may use, and how torch's own must wait. Imports no torch: call it before torch is.

torch's OpenMP threads wait for each other by spinning. That is best on a machine with nothing else to do; where an HTTP
process, or anything, wants one of the cores, a thread that spins keeps from running the one it waits for, and a step
takes 4 to 100 times as long. Passive waiting costs some microseconds for each operation. The native kernels have
threads of their own and are not concerned.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUP_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def configure_torch_threads() -> None:
    """Makes torch's threads sleep while they wait. What the environment already says about it stays."""
    if "GOMP_SPINCOUNT" not in os.environ:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OMP_NUM_THREADS", str(num_usable_cores()))


def num_usable_cores(cpu_max: Path = _CGROUP_CPU_MAX) -> int:
    """Cores this process may run on, at least 1: its affinity, and no more than a container's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text().split()
        if quota != "max":
            cores = min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        # No cgroup v2 here, so no quota known.
        pass
    return max(1, cores)
