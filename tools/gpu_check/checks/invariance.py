"""Whether a row's bits depend on the rows beside it: our kernels', cuBLAS's products, whole passes; and what it costs
to make them independent, by `--deterministic` and by the settings of cuBLAS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.tools.gpu_check.cases.catalogue import invariance_checks
from penstock.tools.gpu_check.checks.correctness import run_checks
from penstock.tools.gpu_check.checks.deterministic_passes import (
    CostSizes,
    PassSizes,
    check_passes,
    check_products,
    measure_cost,
)
from penstock.tools.gpu_check.checks.invariance_child import weight_shapes
from penstock.tools.gpu_check.devices.device_context import open_device_context
from penstock.tools.gpu_check.devices.mirror_launcher import MirrorLauncher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.tools.gpu_check.reporting.results import Results

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    # As vLLM has it for sm_90: no product is split along its length, by whatever workspace.
    "invariant": {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"},
}
"""What a process must have in its environment before it uses CUDA; the child does the rest."""
_CHILD = (sys.executable, "-m", "penstock.tools.gpu_check.checks.invariance_child")


def run(results: Results) -> None:
    launcher = MirrorLauncher()
    reserve_for_settings_s = 0.4 * results.remaining_s
    run_checks(results, launcher, invariance_checks(launcher.shared_bytes_per_sm), reserve_s=0.75 * results.remaining_s)
    context, cost = open_device_context(), CostSizes()
    check_products(results, context, weight_shapes(cost.config), cost.dtype)
    check_passes(results, context, PassSizes(), reserve_for_settings_s)
    measure_cost(results, context, cost, reserve_for_settings_s)
    compare_settings(results, _CHILD)


def compare_settings(results: Results, command: Sequence[str]) -> None:
    """The child prints one JSON object a measurement, last of all lines that begin with a brace."""
    found: dict[str, dict[str, Any]] = {}
    for mode in SETTINGS:
        results.attempt(f"invariance.{mode}", partial(_run_mode, results, command, mode, found), 5.0)
    if len(found) == len(SETTINGS):
        costs = {
            rows: 100 * (found["invariant"]["step_us"][rows] / us - 1)
            for rows, us in found["default"]["step_us"].items()
        }
        for rows, cost in costs.items():
            results.fact(f"invariance.cost.{rows}_rows", cost, "%")
        results.fact("invariance.cost", max(costs.values()), "%", "of the products of a step; the largest")


def _run_mode(results: Results, command: Sequence[str], mode: str, found: dict[str, dict[str, Any]]) -> None:
    share = results.remaining_s / (len(SETTINGS) - len(found))
    done = subprocess.run(
        [*command, mode, f"{share:.1f}"],
        capture_output=True, text=True, check=False, timeout=share + 5, env=os.environ | SETTINGS[mode],
    )  # fmt: skip
    printed = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not printed:
        raise RuntimeError(f"status {done.returncode}: {done.stderr.strip()[-300:]}")
    told: dict[str, Any] = json.loads(printed[-1])
    for shape, rows in told["differing"].items():
        passed = not rows
        name = f"invariance.{mode}.product.{shape}"
        detail = "as with one row" if passed else f"other bits than with one row at {', '.join(map(str, rows))} rows"
        # Without the settings nothing is promised.
        if mode == "invariant":
            results.check(name, passed, detail)
        else:
            results.fact(name, detail)
    for rows, us in told["step_us"].items():
        results.fact(f"invariance.{mode}.products.{rows}_rows", us, "us")
    if "tokens" in told:
        name, detail = f"invariance.{mode}.tokens", told["tokens"]["detail"]
        if mode == "invariant":
            results.check(name, told["tokens"]["same"], detail)
        else:
            results.fact(name, detail)
    if "error" in told:
        results.check(f"invariance.{mode}.child", False, told["error"])
    found[mode] = told
