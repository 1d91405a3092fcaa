"""The process that Nsight Compute watches: a few launches of one kernel case, named by its argument."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

import torch

from penstock.tools.gpu_check.devices.device_context import open_device_context
from penstock.tools.gpu_check.kernel_speed.kernel_cases import KernelSizes, kernel_cases
from penstock.tools.gpu_check.kernel_speed.row_product_cases import row_product_cases

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from penstock.tools.gpu_check.devices.device_context import DeviceContext
    from penstock.tools.gpu_check.kernel_speed.kernel_cases import KernelCase

_WARM_UPS, _PROFILED = 2, 3


def all_cases() -> list[KernelCase]:
    sizes = KernelSizes()
    return [*kernel_cases(sizes), *row_product_cases(sizes)]


def case_names() -> list[str]:
    return [case.name for case in all_cases()]


def run_case(context: DeviceContext, case: KernelCase, profiling: AbstractContextManager[object]) -> None:
    """Run the case. Only its own kernels run within `profiling`."""
    works = itertools.cycle(case.prepare(context).works)
    for work in itertools.islice(works, _WARM_UPS):
        work()
    context.device.synchronize()
    with profiling:
        for work in itertools.islice(works, _PROFILED):
            work()
        context.device.synchronize()


def main(argv: list[str]) -> int:
    case = next(case for case in all_cases() if case.name == argv[0])
    run_case(open_device_context(), case, torch.cuda.profiler.profile())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
