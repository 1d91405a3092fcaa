"""Checks each kernel against its reference, each PTX wrapper against its emulation, and passes against the CPU pass.

The references take the CPU longer than the GPU's work: shares of the checks run in processes of their own.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from penstock.backend.passes.cuda.device.launcher import Launcher
from penstock.process.children import stop_with_parent
from penstock.tools.gpu.cases.attention.choices import choice_checks
from penstock.tools.gpu.cases.catalogue import wgmma_checks, wide_checks
from penstock.tools.gpu.cases.check import Check
from penstock.tools.gpu.checks.encoder_agreement import check_encoder
from penstock.tools.gpu.checks.library_products import check_library_products
from penstock.tools.gpu.checks.pass_agreement import check_families, check_variations
from penstock.tools.gpu.checks.transformers_agreement import check_transformers
from penstock.tools.gpu.devices.device_context import open_device_context
from penstock.tools.gpu.devices.mirror_launcher import MirrorLauncher
from penstock.tools.gpu.environment import device_fault
from penstock.tools.gpu.results import DEADLINE_VARIABLE, Results, SectionOver, is_wanted

_ATTENTION = ("decode", "prefill", "encoder", "choices", "wgmma")
_DEVICE_LOST = 3
_OF_PASSES = ("libraries", "families", "variations")


def run(results: Results) -> None:
    """Run all shares at the same time; with `--match` those of whole passes only if it names them.

    A share that ends otherwise than by itself is a failed check.
    """
    until_s = time.monotonic() + results.remaining_s
    threads = max(1, (os.cpu_count() or 1) // len(SHARES))
    environment = os.environ | {DEADLINE_VARIABLE: str(until_s), "OMP_NUM_THREADS": str(threads)}
    running = {
        share: subprocess.Popen([sys.executable, "-m", __name__, share, str(results.path)], env=environment)
        for share in SHARES
        if share not in _OF_PASSES or is_wanted(share)
    }
    for share, process in running.items():
        status = process.wait()
        if status not in (0, _DEVICE_LOST):  # a lost device is a finding of the share
            results.check(f"correctness.{share}", False, f"its process ended with status {status}")


def main(argv: list[str]) -> int:
    """Run one share: its name, and the file of the section's findings, to which all shares append."""
    stop_with_parent(signal.SIGKILL)
    share, path = argv
    results = Results(Path(path), float(os.environ[DEADLINE_VARIABLE]) - time.monotonic(), device_fault)
    try:
        SHARES[share](results)
    except SectionOver as over:
        print(f"  {share} stops, the device is lost: {over}", flush=True)
        return _DEVICE_LOST
    return 0


def _check_kernels(results: Results, is_included: Callable[[Check], bool]) -> None:
    launcher = MirrorLauncher()
    shared_bytes = launcher.shared_bytes_per_sm
    checks = [*wide_checks(shared_bytes), *choice_checks(shared_bytes)]
    checks += wgmma_checks() if launcher.has_wgmma else ()
    run_checks(results, launcher, filter(is_included, checks))


def _check_libraries(results: Results) -> None:
    context = open_device_context()
    check_library_products(results, context)
    check_encoder(results, context)
    check_transformers(results, context)


SHARES: Mapping[str, Callable[[Results], None]] = {
    "attention": partial(_check_kernels, is_included=lambda check: check.family in _ATTENTION),
    "quantised": partial(_check_kernels, is_included=lambda check: check.family == "quantised"),
    "experts": partial(_check_kernels, is_included=lambda check: check.family == "experts"),
    "other-kernels": partial(
        _check_kernels, is_included=lambda check: check.family not in (*_ATTENTION, "quantised", "experts")
    ),
    "libraries": _check_libraries,
    "families": lambda results: check_families(results, open_device_context()),
    "variations": lambda results: check_variations(results, open_device_context()),
}


def run_checks(results: Results, launcher: Launcher, checks: Iterable[Check], reserve_s: float = 0.0) -> None:
    """Record one finding per family (checks passed, largest error) and one per failed check, of those that `--match`
    names.

    Stops when at most reserve_s seconds of the section's time are left.
    """
    families: defaultdict[str, list[Check]] = defaultdict(list)
    for check in (check for check in checks if is_wanted(f"{check.family}.{check.name}")):
        families[check.family].append(check)
    for family, members in families.items():
        _run_family(results, launcher, family, members, reserve_s)


def _run_family(results: Results, launcher: Launcher, family: str, checks: list[Check], reserve_s: float) -> None:
    num_passed = num_run = 0
    worst, worst_name = 0.0, ""
    for check in checks:
        if results.remaining_s <= reserve_s:
            break
        num_run += 1
        errors: list[float] = []
        if results.attempt(f"{family}.{check.name}", partial(_run, check, launcher, errors)):
            num_passed += 1
            if errors and errors[0] >= worst:
                worst, worst_name = errors[0], check.name
    detail = f"{num_passed} of {len(checks)} passed" + (f"; largest error in {worst_name}" if worst_name else "")
    if num_run < len(checks):
        results.skipped(f"correctness.{family}.rest", f"no time was left for {len(checks) - num_run} checks")
    results.check(f"correctness.{family}", num_run > 0 and num_passed == num_run, detail, worst)


def _run(check: Check, launcher: Launcher, errors: list[float]) -> None:
    error = check.run(launcher)
    if error is not None:
        errors.append(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
