"""Launches one kernel case a few times, for Nsight Compute: docs/gpu/README.md has the command."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING

import torch

from penstock.tools.gpu.devices.device_context import open_device_context
from penstock.tools.gpu.speed.kernel_cases import KernelSizes, kernel_cases
from penstock.tools.gpu.speed.row_product_cases import row_product_cases

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from penstock.tools.gpu.devices.device_context import DeviceContext
    from penstock.tools.gpu.speed.kernel_cases import KernelCase

_WARM_UPS, _PROFILED = 2, 3


def all_cases() -> dict[str, KernelCase]:
    sizes = KernelSizes()
    return {case.name: case for case in (*kernel_cases(sizes), *row_product_cases(sizes))}


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
    cases = all_cases()
    if len(argv) != 1 or argv[0] not in cases:
        print(f"give one case: {', '.join(cases)}", file=sys.stderr)
        return 2
    run_case(open_device_context(), cases[argv[0]], torch.cuda.profiler.profile())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
