"""Checks whether a row's bits depend on the other rows: in our kernels, cuBLAS's products and whole passes.

Also measures what independence costs, with `--deterministic` and with cuBLAS's settings.
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
from penstock.tools.gpu_check.devices.device_context import open_device_context
from penstock.tools.gpu_check.devices.mirror_launcher import MirrorLauncher
from penstock.tools.gpu_check.model_configs import weight_shapes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.tools.gpu_check.reporting.results import Results

SETTINGS: dict[str, dict[str, str]] = {
    "default": {},
    # vLLM's settings for sm_90: cuBLAS splits no product along its inner dimension, whatever workspace it has.
    "invariant": {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"},
}
"""Environment variables to set before a process first uses CUDA. The child sets the rest."""
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
    """Run the child once with each setting, and compare the times.

    The child prints its results as JSON again after each part; the last such line counts.
    """
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
        results.fact("invariance.cost", max(costs.values()), "%", "largest slowdown of a step's products")


def _run_mode(results: Results, command: Sequence[str], mode: str, found: dict[str, dict[str, Any]]) -> None:
    share = results.remaining_s / (len(SETTINGS) - len(found))
    done = subprocess.run(
        [*command, mode, f"{share:.1f}"],
        capture_output=True, text=True, check=False, timeout=share + 5, env=os.environ | SETTINGS[mode],
    )  # fmt: skip
    printed = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not printed:
        raise RuntimeError(f"status {done.returncode}: {done.stderr.strip()[-300:]}")
    measured: dict[str, Any] = json.loads(printed[-1])
    for shape, rows in measured["differing"].items():
        passed = not rows
        name = f"invariance.{mode}.product.{shape}"
        detail = "same bits as with one row" if passed else f"differs from one row at {', '.join(map(str, rows))} rows"
        # The default settings promise nothing, so differences are facts, not failures.
        if mode == "invariant":
            results.check(name, passed, detail)
        else:
            results.fact(name, detail)
    for rows, us in measured["step_us"].items():
        results.fact(f"invariance.{mode}.products.{rows}_rows", us, "us")
    if "tokens" in measured:
        # Without --deterministic few rows are multiplied by our kernels, and more by cuBLAS.
        results.fact(f"invariance.{mode}.tokens", measured["tokens"]["detail"])
    if "error" in measured:
        results.check(f"invariance.{mode}.child", False, measured["error"])
    found[mode] = measured
