"""Times cases of kernels: what they launch, beside other ways, other settings and another checkout's kernels, in turns.

As a command it launches one case a few times, for Nsight Compute: docs/gpu/README.md has the line.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from penstock.tools.gpu import items
from penstock.tools.gpu.devices import device_context
from penstock.tools.gpu.devices.device_context import DeviceContext
from penstock.tools.gpu.devices.other_tree import OtherTree, SharedBuffers
from penstock.tools.gpu.devices.timing import Works
from penstock.tools.gpu.items import Item
from penstock.tools.gpu.results import OTHER_TREE_VARIABLE, Results
from penstock.tools.gpu.speed import kernel_cases, product_cases
from penstock.tools.gpu.speed.kernel_cases import KernelSizes, PreparedCase

SIZES = KernelSizes()
_WARM_UPS, _PROFILED = 2, 3


@dataclass(frozen=True)
class Side:
    """One of several ways to run an item's cases. The first one is this checkout's with the adopted settings."""

    suffix: str
    prepare: Callable[[str, tuple[Any, ...]], list[PreparedCase]]
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function


def run(results: Results, item: Item) -> None:
    context = device_context.open_device_context()
    sides = [Side("", partial(prepare, SIZES, context))]
    if item.settings:
        chosen = replace(context, choices=replace(context.choices, **dict(item.settings)))
        suffix = "".join(f"+{name}={value}" for name, value in item.settings)
        sides.append(Side(suffix, partial(prepare, SIZES, chosen)))
    if directory := os.environ.get(OTHER_TREE_VARIABLE):
        sides.append(other_side(_opened(directory)))
    compare(results, context, item, sides)


def prepare(sizes: KernelSizes, context: DeviceContext, kind: str, arguments: tuple[Any, ...]) -> list[PreparedCase]:
    """Return an item's case, or one case for each way to compute it. `--ab` calls it in the other checkout."""
    function = getattr(kernel_cases, kind, None) or getattr(product_cases, kind)
    made: PreparedCase | list[PreparedCase] = function(sizes, context, *arguments)
    return made if isinstance(made, list) else [made]


@cache
def _opened(directory: str) -> OtherTree:
    return OtherTree(Path(directory))


def other_side(tree: OtherTree) -> Side:
    there, stream = tree.load("penstock.tools.gpu.speed.kernels"), None
    if torch.cuda.is_available():
        stream = torch.cuda.current_stream()
    context = tree.calling(tree.load("penstock.tools.gpu.devices.device_context").open_device_context)()
    if stream is not None:  # the other device made its own the current one
        torch.cuda.set_stream(stream)
    prepared = tree.calling(partial(there.prepare, there.SIZES, context))
    return Side(f"@{tree.directory.name}", prepared, tree.calling)


def compare(results: Results, context: DeviceContext, item: Item, sides: list[Side]) -> None:
    """Time all cases of all sides in turns. The sides share their large buffers."""
    kind, *arguments = item.arguments
    base, buffers = item.name.partition("+")[0], SharedBuffers()
    candidates: dict[str, PreparedCase] = {}
    works: list[Works] = []
    for side in sides:
        buffers.rewind()
        with buffers:
            cases = side.prepare(kind, tuple(arguments))
        for case in cases:
            candidates[base + (case.way and f".{case.way}") + side.suffix] = case
            works.append([side.wrap(work) for work in case.works])
    times = dict(zip(candidates, context.clock.work_us(*works), strict=True))
    for name, case in candidates.items():
        ours = name.partition("+")[0].partition("@")[0]
        detail = "" if name == ours else f"{times[ours] / times[name]:.3f} times as fast"
        results.timed(name, times[name], case.num_bytes, case.flop, detail)


def run_case(case: PreparedCase, context: DeviceContext, profiling: AbstractContextManager[object]) -> None:
    """Run a case. Only its own kernels run within `profiling`."""
    works = itertools.cycle(case.works)
    for work in itertools.islice(works, _WARM_UPS):
        work()
    context.device.synchronize()
    with profiling:
        for work in itertools.islice(works, _PROFILED):
            work()
        context.device.synchronize()


def main(argv: list[str]) -> int:
    known = [item for item in items.ITEMS if item.module == run.__module__ or item.module.endswith("speed.kernels")]
    chosen = [item for item in known if [item.name] == argv]
    if not chosen:
        print(f"give one case: {', '.join(item.name for item in known)}", file=sys.stderr)
        return 2
    context = device_context.open_device_context()
    kind, *arguments = chosen[0].arguments
    for case in prepare(SIZES, context, kind, tuple(arguments)):
        run_case(case, context, torch.cuda.profiler.profile())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
