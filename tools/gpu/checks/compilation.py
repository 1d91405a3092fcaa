"""Checks that every kernel compiles without spills: for this GPU, or without one for every supported architecture.

The item "cubins" writes them to $PENSTOCK_CUBINS, for a later run elsewhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from penstock.backend.passes.cuda import kernel_manifest
from penstock.backend.passes.cuda.device import nvrtc
from penstock.backend.passes.cuda.device.cubin_cache import cubin_name, write_cubin
from penstock.backend.passes.cuda.device.cupy_launcher import CupyLauncher
from penstock.backend.passes.cuda.device.launcher import Kernel, KernelFailed, group_by_module
from penstock.process.cache_directory import CUBINS_VARIABLE
from penstock.tools.gpu.cases import ptx_wrappers as wrappers
from penstock.tools.gpu.cases.attention.catalogue import unlisted_kernels
from penstock.tools.gpu.items import Item
from penstock.tools.gpu.results import Results

_MAX_WORKERS = 12


def run(results: Results, item: Item) -> None:
    kernels = all_kernels()
    if item.arguments == ("all",):
        directory = Path(os.environ[CUBINS_VARIABLE])
        compile_for(results, kernels, nvrtc.ARCHITECTURES, min(os.cpu_count() or 1, _MAX_WORKERS), directory)
        return
    launcher = CupyLauncher(0)
    largest = nvrtc.SHARED_BYTES_LIMIT.get(launcher.cubins.arch, 0)
    kernels = [kernel for kernel in kernels if nvrtc.compiles_for(kernel, launcher.cubins.arch)]
    kernels = [kernel for kernel in kernels if kernel.shared_bytes <= largest]  # others have larger rings
    results.attempt("compile.load", lambda: load_all(results, launcher, kernels))


def all_kernels() -> list[Kernel]:
    """The kernels of the passes and of the checks."""
    of_checks = (wrappers.wrapper_kernel("multiply", half=half) for half in (0, 1))
    return list(dict.fromkeys([*kernel_manifest.kernels(), *unlisted_kernels(), *of_checks]))


def compile_for(
    results: Results, kernels: Sequence[Kernel], architectures: Sequence[str], num_workers: int, cubins: Path
) -> None:
    """Compile for each architecture, and write the cubins."""
    results.fact("compile.nvrtc", nvrtc.version())
    cubins.mkdir(parents=True, exist_ok=True)
    for arch in architectures:
        started_s = time.monotonic()
        compiled = [kernel for kernel in kernels if nvrtc.compiles_for(kernel, arch)]
        reports = {report.kernel: report for report in nvrtc.compile_kernels(compiled, arch, num_workers)}
        results.fact(f"compile.{arch}.wall", time.monotonic() - started_s, "s", f"{len(reports)} kernels")
        for group in group_by_module(compiled):
            write_cubin(cubins / cubin_name(group, arch), reports[group[0]].cubin)
        spilling = [str(report.kernel) for report in reports.values() if report.spill_bytes]
        results.check(f"compile.{arch}.no_spills", not spilling, ", ".join(spilling), len(reports))


def load_all(results: Results, launcher: CupyLauncher, kernels: Sequence[Kernel]) -> None:
    """Load the kernels as the backend does at its start. Later items find those compiled here in the cache."""
    started_s = time.monotonic()
    try:
        launcher.prepare(kernels)
    except KernelFailed:
        for kernel in kernels:
            results.attempt(f"compile.load.{kernel}", partial(launcher.prepare, [kernel]))
        raise
    compiled = f"s; {launcher.cubins.num_compiled} modules were not in the cache"
    results.check("compile.load", True, compiled, time.monotonic() - started_s)
    spilling = [str(kernel) for kernel in kernels if launcher.resources[kernel].local_bytes]
    results.check(f"compile.{launcher.cubins.arch}.no_spills", not spilling, ", ".join(spilling), len(kernels))
