"""What Nsight Compute watches: one kernel case by name, a few launches of it between the profiler's start and stop."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

import torch

from penstock.tools.gpu_check.devices.device_context import open_lab
from penstock.tools.gpu_check.speed.kernel_cases import Sizes, kernel_cases

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from penstock.tools.gpu_check.devices.device_context import Lab
    from penstock.tools.gpu_check.speed.kernel_cases import KernelCase

_WARM_UPS, _PROFILED = 2, 3


def case_names() -> list[str]:
    return [case.name for case in kernel_cases(Sizes())]


def run_case(lab: Lab, case: KernelCase, profiling: AbstractContextManager[object]) -> None:
    """Nothing but the case's own kernels runs within `profiling`."""
    works = itertools.cycle(case.prepare(lab).works)
    for work in itertools.islice(works, _WARM_UPS):
        work()
    lab.device.synchronize()
    with profiling:
        for work in itertools.islice(works, _PROFILED):
            work()
        lab.device.synchronize()


def main(argv: list[str]) -> int:
    case = next(case for case in kernel_cases(Sizes()) if case.name == argv[0])
    run_case(open_lab(), case, torch.cuda.profiler.profile())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
