"""Checks kernels against their references, and each PTX wrapper against its emulation.

The references take the CPU longer than the GPU's work: these items run beside each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import product

import torch

from penstock.backend.checkpoint.config.decoder_config import Experts
from penstock.backend.passes.cuda.device.device import Device
from penstock.backend.passes.cuda.device.launcher import Launcher
from penstock.tools.gpu.cases.attention.catalogue import choice_checks
from penstock.tools.gpu.cases.catalogue import wgmma_checks, wide_checks
from penstock.tools.gpu.cases.check import Check
from penstock.tools.gpu.cases.products import quantized, rounded
from penstock.tools.gpu.cases.products.experts import ExpertsCase, check_experts
from penstock.tools.gpu.devices import device_context, mirror_launcher
from penstock.tools.gpu.items import Item
from penstock.tools.gpu.results import Results

_LIBRARY_SHAPES = ((2064, 4096, 300), (4096, 1096, 2048))
"""Outputs, inputs and rows."""
_GROUPED = ExpertsCase(Experts(16, 4, 384, normalises=True), 2048, 300, torch.bfloat16, grouped_rows=300)


def run(results: Results, item: Item) -> None:
    if item.arguments == ("library",):
        check_library(results, device_context.open_device_context().device)
        return
    launcher = mirror_launcher.MirrorLauncher()
    checks = [*wide_checks(launcher.shared_bytes_per_sm), *choice_checks(launcher.shared_bytes_per_sm)]
    checks += wgmma_checks() if launcher.has_wgmma else ()
    run_checks(results, launcher, (check for check in checks if check.family in item.arguments))


def run_checks(results: Results, launcher: Launcher, checks: Iterable[Check]) -> None:
    """Record one finding per family (checks passed, largest error) and one per failed check, until the time is over."""
    families: defaultdict[str, list[Check]] = defaultdict(list)
    for check in checks:
        families[check.family].append(check)
    for family, members in families.items():
        _run_family(results, launcher, family, members)


def _run_family(results: Results, launcher: Launcher, family: str, checks: list[Check]) -> None:
    num_passed = num_run = 0
    worst, worst_name = 0.0, ""
    for check in checks:
        if results.remaining_s <= 0:
            results.skipped(f"correctness.{family}.rest", f"no time was left for {len(checks) - num_run} checks")
            break
        num_run += 1
        errors: list[float] = []
        work = partial(lambda check, errors: errors.append(check.run(launcher) or 0.0), check, errors)
        if results.attempt(f"{family}.{check.name}", work):
            num_passed += 1
            if errors[0] > worst:
                worst, worst_name = errors[0], check.name
    detail = f"{num_passed} of {len(checks)} passed" + (f"; largest error in {worst_name}" if worst_name else "")
    results.check(f"correctness.{family}", num_run > 0 and num_passed == num_run, detail, worst)


def check_library(
    results: Results,
    device: Device,
    shapes: tuple[tuple[int, int, int], ...] = _LIBRARY_SHAPES,
    grouped: ExpertsCase = _GROUPED,
) -> None:
    """Check `torch._int_mm` and `torch._scaled_mm` with rounded rows, 16-bit products with widened weights, and grouped
    products of experts.

    All tensors are on the device: the kernels' own checks leave torch on the CPU, where other code multiplies.
    """
    launcher, on_device = device.launcher, device.torch_device
    check_grouped = partial(check_experts, launcher, replace(grouped, device=on_device))
    results.agree("library.grouped", lambda: ("error of a row", check_grouped()))
    for (name, dtype), form in product(quantized.DTYPES.items(), quantized.FORMS):
        widened = quantized.LinearCase(form, 72, 256, 65, dtype, has_bias=True, scale=2.0)
        checks = [("widened", partial(quantized.check_widened, launcher, widened, on_device))]
        for outputs, inputs, rows in shapes if form in rounded.FORMS else ():
            for changes in ({"has_bias": True}, {"scale": 0.5}):
                case = quantized.LinearCase(form, outputs, inputs, rows, dtype, **changes)
                check = partial(rounded.check_rounded, launcher, case, device.compute_capability, on_device)
                checks.append((f"rounded.{rows}.{next(iter(changes))}", check))
        for kind, check in checks:
            results.agree(f"library.{kind}.{name}.{form}", lambda check=check: ("error, of the tolerance", check()))  # type: ignore[misc]
