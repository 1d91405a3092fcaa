"""Checks that every kernel compiles without spills: for this GPU, or without one for every supported architecture."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

from penstock.backend.passes.decoder.cuda import kernel_manifest
from penstock.backend.passes.decoder.cuda.device import nvrtc
from penstock.backend.passes.decoder.cuda.device.cupy_launcher import CupyLauncher
from penstock.backend.passes.decoder.cuda.device.launcher import KernelFailed
from penstock.tools.gpu_check.cases import ptx

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.backend.passes.decoder.cuda.device.launcher import Kernel
    from penstock.backend.passes.decoder.cuda.device.nvrtc import CompileReport
    from penstock.tools.gpu_check.reporting.results import Results

_MAX_WORKERS = 12
_REGISTERS_OF_A_MULTIPROCESSOR = 65_536


def run(results: Results) -> None:
    kernels, num_workers = list(kernel_manifest.kernels()), min(os.cpu_count() or 1, _MAX_WORKERS)
    arch = gpu_architecture()
    compile_for(results, kernels, nvrtc.ARCHITECTURES if arch is None else (arch,), num_workers)
    if arch is not None:
        wrappers = [ptx.wrapper_kernel(name) for name in ("multiply", "copy")]
        results.attempt("compile.load", lambda: load_all(results, [*kernels, *wrappers]))


def gpu_architecture() -> str | None:
    """The first GPU's architecture, such as sm_90; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    return "sm_{}{}".format(*torch.cuda.get_device_capability(0))


def compile_for(results: Results, kernels: Sequence[Kernel], architectures: Sequence[str], num_workers: int) -> None:
    results.fact("compile.nvrtc", nvrtc.version())
    for arch in architectures:
        started_s = time.monotonic()
        reports = nvrtc.compile_kernels(kernels, arch, num_workers)
        results.fact(f"compile.{arch}.kernels", len(reports))
        results.fact(f"compile.{arch}.wall", time.monotonic() - started_s, "s")
        _check(results, arch, reports)


def _check(results: Results, arch: str, reports: list[CompileReport]) -> None:
    spilling = [str(report.kernel) for report in reports if report.spill_bytes]
    results.check(f"compile.{arch}.no_spills", not spilling, ", ".join(spilling))
    too_wide = [
        f"{report.kernel}: {report.registers} registers"
        for report in reports
        if report.registers * report.kernel.num_threads > _REGISTERS_OF_A_MULTIPROCESSOR
    ]
    results.check(f"compile.{arch}.fits", not too_wide, ", ".join(too_wide))
    registers: defaultdict[str, list[int]] = defaultdict(list)
    for report in reports:
        registers[report.kernel.entry].append(report.registers)
    shown = ", ".join(f"{entry} {min(counts)}–{max(counts)}" for entry, counts in sorted(registers.items()))
    results.fact(f"compile.{arch}.registers", shown)


def load_all(results: Results, kernels: Sequence[Kernel]) -> None:
    """Load the kernels with CuPy, as the backend does at its start. This fills CuPy's disk cache for later sections."""
    launcher = CupyLauncher(0)
    started_s = time.monotonic()
    try:
        launcher.prepare(kernels)
    except KernelFailed:
        for kernel in kernels:
            results.attempt(f"compile.load.{kernel}", partial(launcher.prepare, [kernel]))
        raise
    results.check("compile.load", True, "", len(kernels))
    results.fact("compile.load.wall", time.monotonic() - started_s, "s")
